"""halofx: a graph compiler that splits 3D CNNs over devices, exactly."""

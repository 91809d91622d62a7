"""Drop-ins for `torch_geometric.nn.conv`."""

"""Training of models for the classification of nodes or graphs: :func:`pyg_dfgnn.training.run.train`."""

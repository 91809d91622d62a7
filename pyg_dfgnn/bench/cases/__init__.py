"""What is measured, as data: one file per family of ops."""

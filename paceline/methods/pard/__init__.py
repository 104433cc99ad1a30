"""What PARD and PARD-2 share: their checkpoints, their public layout, and the model that training starts from."""

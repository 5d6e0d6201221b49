"""Communication-efficient federated learning on Flower: sparse, quantized updates with error memory."""

"""What engine, FSDP2 and precision share about gradients; imports none of them."""

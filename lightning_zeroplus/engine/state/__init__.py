"""An engine's state by parameter, for checkpoints: ``layout`` says where it lies, ``parts`` reads and writes it."""

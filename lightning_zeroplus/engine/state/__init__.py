"""What a checkpoint has of an engine, by parameter: ``layout`` says where it lies, ``parts`` reads and writes it."""

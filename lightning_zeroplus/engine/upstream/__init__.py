"""``probe`` lists what the engine relies on in DeepSpeed; the other files work around what DeepSpeed cannot do."""

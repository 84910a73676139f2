"""Lightning callbacks that audit gradients and measure their reduction."""

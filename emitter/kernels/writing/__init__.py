"""Writing a kernel: its text, vectors of f32, what registers there are, and the names of symbols."""

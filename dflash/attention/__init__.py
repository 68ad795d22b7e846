"""Attention: kernels (what is computed) and strategies (how it is made safe to compile in threads)."""

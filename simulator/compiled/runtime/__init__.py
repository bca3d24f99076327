"""What only a compiler needs: policies' hooks as machine code that kernels call through pointers."""

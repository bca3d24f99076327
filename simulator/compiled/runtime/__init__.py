"""What only a compiler needs: state, its layout, machine code on disk, hooks as pointers."""

"""What every other package needs: errors, files, the command line, progress, processes."""

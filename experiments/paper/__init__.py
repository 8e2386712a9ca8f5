"""The tables and figures of the paper (Section 5, Appendices D and E), each by one command."""

"""Numbers with provenance: ops and models beside their peers, in one process, interleaved."""

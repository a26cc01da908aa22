"""What training holds: measured on this rank, and what the arithmetic says it should be."""

from __future__ import annotations

from shardwise.report.closed_form import closed_form
from shardwise.report.held_bytes import HeldBytes, held_bytes
from shardwise.report.memory import MemoryReport, memory_report

__all__ = ["HeldBytes", "MemoryReport", "closed_form", "held_bytes", "memory_report"]

"""Bytes are counted with their storage: once, as what they are for, until they are free."""

from __future__ import annotations

import threading

import torch

from shardwise.runtime.meter import Holding, Meter

CPU = torch.device("cpu")


def test_a_storage_counts_once_until_its_last_view_is_gone() -> None:
    meter = Meter(CPU)
    tensor = torch.zeros(10)
    view = tensor[3:5]
    for watched in (tensor, view, tensor):
        meter.watch(watched, Holding.BUFFERS)
        assert meter.held[Holding.BUFFERS] == 40
    del tensor, watched
    assert meter.held[Holding.BUFFERS] == 40
    del view
    assert sum(meter.held.values()) == 0
    assert meter.peak_bytes == 40
    meter.reset()
    assert meter.peak_bytes == 0


def test_what_is_saved_is_not_counted_as_an_activation_too() -> None:
    meter = Meter(CPU)
    chunk, activation = torch.zeros(10), torch.zeros(5)
    meter.watch(chunk, Holding.GATHERED)
    meter.watch_new(chunk[:2], Holding.ACTIVATIONS)
    meter.watch_new(activation, Holding.ACTIVATIONS)
    meter.watch_new(torch.zeros(3).to_sparse(), Holding.ACTIVATIONS)
    assert meter.held[Holding.GATHERED] == 40
    assert meter.held[Holding.ACTIVATIONS] == 20
    meter.watch(chunk, Holding.BUFFERS)
    assert (meter.held[Holding.GATHERED], meter.held[Holding.BUFFERS]) == (0, 40)


def test_the_lean_peak_leaves_slices_out_and_counts_the_least_cache() -> None:
    meter = Meter(CPU)
    meter.cache_bytes = 100
    gathered, buffer = torch.zeros(100), torch.zeros(3)
    meter.watch(gathered, Holding.GATHERED)
    meter.watch(buffer, Holding.BUFFERS)
    meter.note_slices(1000)
    assert meter.peak_bytes == 400 + 12 + 1000
    assert meter.lean_peak_bytes == 100 + 12
    assert meter.peak[Holding.SLICES] == 1000


def test_a_meter_that_is_off_and_other_devices_count_nothing() -> None:
    tensor = torch.zeros(4)
    for meter in (Meter(CPU, is_on=False), Meter(torch.device("meta"))):
        meter.watch(tensor, Holding.BUFFERS)
        meter.watch_new(tensor, Holding.ACTIVATIONS)
        assert sum(meter.held.values()) == 0


def test_threads_lose_no_byte() -> None:
    meter = Meter(CPU)

    def work() -> None:
        for numel in range(1, 300):
            meter.watch(torch.zeros(numel), Holding.BUFFERS)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(meter.held.values()) == 0
    assert meter.peak_bytes >= 4 * 299


def test_the_allocator_of_a_device_adds_what_was_not_watched(monkeypatch) -> None:
    meter = Meter(torch.device("cuda"))
    meter.note_slices(600)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 1000)
    assert meter.unseen_bytes == 400
    assert Meter(CPU).unseen_bytes == 0

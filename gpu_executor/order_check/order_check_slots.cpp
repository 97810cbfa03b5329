// The slots of a mini-batch (gpu_executor/order_check/order_check_batch.h).

#include <algorithm>

#include "gpu_executor/order_check/order_check_batch.h"

namespace poise {
namespace {

using messages::Kind;
using messages::Place;
using messages::Where;

constexpr std::uint32_t row_bits(std::uint32_t first, std::uint32_t end) {
  return ((1u << end) - 1) & ~((1u << first) - 1);
}

}  // namespace

void SlotCheck::run() {
  check_loads();
  check_regenerate();
  check_entries();
}

void SlotCheck::check_loads() {
  for (std::uint32_t i = 0; i < size_of_vector(batch_.tables.loads()); ++i) {
    const messages::BlockRun& run = *batch_.tables.loads()->Get(i);
    batch_.check_place("load", i, run.kind(), run.place());
    if (run.count() == 0 || run.tail_tokens() == 0 || run.tail_tokens() > kBlockTokens) {
      batch_.refuse("load {} is of {} blocks, the last with {} tokens of {}", i, run.count(),
                    run.tail_tokens(), kBlockTokens);
    }
    const std::uint32_t blocks = batch_.pool_blocks(run.kind(), run.place());
    if (std::uint64_t{run.first_block()} + run.count() > blocks) {
      batch_.refuse("load {} is of {} {} blocks from {}, the {} pool has {}", i, run.count(),
                    messages::EnumNameKind(run.kind()), run.first_block(),
                    messages::EnumNamePlace(run.place()), blocks);
    }
    auto& into = slots(run.kind());
    const std::size_t most = slots_for(run.kind(), run.place());
    if (std::uint64_t{run.first_slot()} + run.count() > most) {
      batch_.refuse("load {} goes to {} {} slots from {}, the buffer has {}", i, run.count(),
                    messages::EnumNameKind(run.kind()), run.first_slot(), most);
    }
    for (std::uint32_t j = 0; j < run.count(); ++j) {
      Slot& slot = into[run.first_slot() + j];
      if (slot.loaded != 0) {
        batch_.refuse("load {} goes to {} slot {}, which another load fills", i,
                      messages::EnumNameKind(run.kind()), run.first_slot() + j);
      }
      const std::uint32_t tokens = j + 1 == run.count() ? run.tail_tokens() : kBlockTokens;
      slot.loaded = static_cast<std::uint16_t>(row_bits(0, tokens));
      slot.block = run.first_block() + j;
      slot.place = run.place();
    }
  }
}

void SlotCheck::check_regenerate() {
  for (std::uint32_t i = 0; i < size_of_vector(batch_.tables.regenerate()); ++i) {
    const messages::SlotRange& range = *batch_.tables.regenerate()->Get(i);
    if (range.count() == 0 || std::uint64_t{range.first_slot()} + range.count() > act_.size()) {
      batch_.refuse("regenerate {} is of {} slots from {}, the ACT buffer has {}", i, range.count(),
                    range.first_slot(), act_.size());
    }
    for (std::uint32_t slot = range.first_slot(); slot < range.first_slot() + range.count();
         ++slot) {
      if (act_[slot].loaded == 0) {
        batch_.refuse("regenerate {} reads ACT slot {}, which nothing loads", i, slot);
      }
      if (act_[slot].regenerated) {
        batch_.refuse("regenerate {} makes slot {} a second time", i, slot);
      }
      act_[slot].regenerated = true;
    }
  }
}

void SlotCheck::check_entries() {
  for (std::uint32_t i = 0; i < batch_.entries(); ++i) {
    const messages::AttentionEntry& entry = *batch_.tables.entries()->Get(i);
    const bool dropped = entry.place() == Place::Dropped;
    if (entry.place() != Place::Nowhere && !dropped) {
      batch_.check_place("entry", i, entry.kind(), entry.place());
    } else if (entry.kind() != Kind::Kv || entry.where() != Where::LoadedKv) {
      batch_.refuse("entry {} is {}: it is of kind Kv, in the KV buffer", i,
                    dropped ? "dropped" : "kept nowhere");
    }
    if (dropped) {  // it has no slot
      continue;
    }
    if (entry.where() == Where::Activation) {
      check_absorbed(i, entry);
    } else if (entry.where() != Where::LoadedKv && entry.where() != Where::RegeneratedKv) {
      batch_.refuse("entry {} is to be computed {} ({}), which this device does not do", i,
                    entry.where() == Where::HostInPlace ? "on host cores" : "nowhere known",
                    static_cast<int>(entry.where()));
    }
    if (entry.place() == Place::Gpu) {
      check_entry_of_device(i, entry);
    }
    const auto buffer = entry.where() == Where::LoadedKv ? Kind::Kv : Kind::Act;
    if (const std::size_t most = slots_for(buffer, entry.place()); entry.slot() >= most) {
      batch_.refuse("entry {} is slot {} of {}", i, entry.slot(), most);
    }
  }
  for (std::uint32_t i = 0; i < batch_.tables.sequences()->size(); ++i) {
    check_context(i, *batch_.tables.sequences()->Get(i));
  }
}

void SlotCheck::check_absorbed(std::uint32_t i, const messages::AttentionEntry& entry) const {
  if (!batch_.limits.absorption) {
    batch_.refuse(
        "entry {} is to be computed straight from activations ({}), which this device does not do: "
        "its Configure did not ask for it",
        i, static_cast<int>(entry.where()));
  }
  if (entry.kind() != Kind::Act) {
    batch_.refuse("entry {} is of kind {}, and to be read as {}", i,
                  messages::EnumNameKind(entry.kind()), messages::EnumNameWhere(entry.where()));
  }
}

// Attention goes by such an entry alone to where its block lies.
void SlotCheck::check_entry_of_device(std::uint32_t i,
                                      const messages::AttentionEntry& entry) const {
  if ((entry.kind() == Kind::Kv) != (entry.where() == Where::LoadedKv)) {
    batch_.refuse("entry {} is of kind {}, on the device, and to be read as {}", i,
                  messages::EnumNameKind(entry.kind()), messages::EnumNameWhere(entry.where()));
  }
  const std::uint32_t blocks = batch_.pool_blocks(entry.kind(), entry.place());
  if (entry.block() >= blocks) {
    batch_.refuse("entry {} is {} block {}, the Gpu pool has {}", i,
                  messages::EnumNameKind(entry.kind()), entry.block(), blocks);
  }
}

void SlotCheck::check_context(std::uint32_t index, const messages::Sequence& sequence) {
  const std::int64_t end = std::int64_t{sequence.context()} + sequence.new_tokens();
  for (std::uint32_t j = 0; j < blocks_of(sequence); ++j) {
    const messages::AttentionEntry& entry =
        *batch_.tables.entries()->Get(sequence.first_entry() + j);
    if (entry.place() == Place::Dropped) {
      batch_.check_dropped(index, j);
      continue;
    }
    if (entry.where() == Where::Activation && sequence.new_tokens() != 1) {
      batch_.refuse("sequence {}, block {}: {} new rows attend activations, which only one does",
                    index, j, sequence.new_tokens());
    }
    const std::int64_t start = std::int64_t{j} * kBlockTokens;
    const auto old_rows = static_cast<std::uint32_t>(
        std::clamp<std::int64_t>(sequence.context() - start, 0, kBlockTokens));
    const auto all_rows =
        static_cast<std::uint32_t>(std::min<std::int64_t>(end - start, kBlockTokens));
    Slot& slot = slots_read(entry)[entry.slot()];
    const std::uint32_t reads = row_bits(0, old_rows);
    const std::uint32_t writes = row_bits(old_rows, all_rows);
    const bool nowhere = entry.place() == Place::Nowhere;
    if (nowhere) {
      check_made_again(index, j, slot, reads, writes);
    } else if (old_rows > 0) {
      check_source(index, j, entry, slot, reads);
    }
    if ((reads & slot.written & ~slot.made) != 0 || (!nowhere && (reads & slot.made) != 0) ||
        (writes & (slot.read | slot.written)) != 0) {
      batch_.refuse("sequence {}, block {}: its rows in slot {} are another's too", index, j,
                    entry.slot());
    }
    slot.read = static_cast<std::uint16_t>(slot.read | reads);
    slot.written = static_cast<std::uint16_t>(slot.written | writes);
  }
}

void SlotCheck::check_made_again(std::uint32_t index, std::uint32_t j, Slot& slot,
                                 std::uint32_t reads, std::uint32_t writes) {
  const messages::Sequence& sequence = *batch_.tables.sequences()->Get(index);
  const std::uint32_t entry = sequence.first_entry() + j;
  const bool same = slot.entry == entry && slot.position == j && slot.request == sequence.request();
  if (slot.loaded != 0 || (slot.made != 0 && !same)) {
    batch_.refuse("sequence {}, block {}: its rows in slot {} are another's too", index, j,
                  batch_.tables.entries()->Get(entry)->slot());
  }
  if ((reads & ~std::uint32_t{slot.made}) != 0) {
    batch_.refuse("sequence {}, block {}: rows of slot {} are read that nothing makes", index, j,
                  batch_.tables.entries()->Get(entry)->slot());
  }
  slot.entry = entry;
  slot.position = j;
  slot.request = sequence.request();
  slot.made = static_cast<std::uint16_t>(slot.made | (writes & ~std::uint32_t{slot.written}));
}

void SlotCheck::check_source(std::uint32_t index, std::uint32_t j,
                             const messages::AttentionEntry& entry, const Slot& slot,
                             std::uint32_t reads) const {
  const bool loaded = entry.where() == Where::LoadedKv;
  const bool made = entry.where() == Where::RegeneratedKv;
  if ((reads & ~std::uint32_t{slot.loaded}) != 0 || (made && !slot.regenerated)) {
    batch_.refuse("sequence {}, block {}: rows of slot {} are read that nothing {}", index, j,
                  entry.slot(), made ? "loads and makes" : "loads");
  }
  if (entry.kind() != (loaded ? Kind::Kv : Kind::Act) || entry.block() != slot.block ||
      entry.place() != slot.place) {
    batch_.refuse("sequence {}, block {} is {} block {} ({}), slot {} holds {} block {} ({})",
                  index, j, messages::EnumNameKind(entry.kind()), entry.block(),
                  messages::EnumNamePlace(entry.place()), entry.slot(), loaded ? "Kv" : "Act",
                  slot.block, messages::EnumNamePlace(slot.place));
  }
}

}  // namespace poise

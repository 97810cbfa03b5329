// A mini-batch that host cores attend (gpu_executor/order_check/order_check_batch.h).

#include <vector>

#include "gpu_executor/order_check/order_check_batch.h"

namespace poise {

void check_host_batch(const CheckedBatch& batch) {
  if (!batch.limits.host_attention) {
    batch.refuse(
        "entry 0 is to be computed on host cores ({}), which this device does not do: its "
        "Configure "
        "did not ask for it",
        static_cast<int>(messages::Where::HostInPlace));
  }
  if (size_of_vector(batch.tables.loads()) + size_of_vector(batch.tables.regenerate()) > 0) {
    batch.refuse("host cores attend it, and it loads or regenerates blocks");
  }
  const std::uint32_t blocks = batch.pool_blocks(messages::Kind::Kv, messages::Place::Host);
  std::vector<bool> taken(blocks);
  std::vector<bool> read(batch.entries());
  for (std::uint32_t i = 0; i < batch.entries(); ++i) {
    const messages::AttentionEntry& entry = *batch.tables.entries()->Get(i);
    const bool dropped = entry.place() == messages::Place::Dropped;
    if (entry.where() != messages::Where::HostInPlace || entry.kind() != messages::Kind::Kv ||
        (entry.place() != messages::Place::Host && !dropped)) {
      batch.refuse("entry {} is no Kv block of the host, as all that host cores attend are", i);
    }
    if (dropped) {
      continue;
    }
    if (entry.block() >= blocks || taken[entry.block()]) {
      batch.refuse("entry {} is Kv block {} {}", i, entry.block(),
                   entry.block() >= blocks ? fmt::format("of {}", blocks) : "again");
    }
    taken[entry.block()] = true;
  }
  for (std::uint32_t i = 0; i < batch.tables.sequences()->size(); ++i) {
    const messages::Sequence& sequence = *batch.tables.sequences()->Get(i);
    for (std::uint32_t j = 0; j < blocks_of(sequence); ++j) {
      if (read[sequence.first_entry() + j]) {
        batch.refuse("sequence {}, block {}: its entry is another's too", i, j);
      }
      read[sequence.first_entry() + j] = true;
      if (batch.tables.entries()->Get(sequence.first_entry() + j)->place() ==
          messages::Place::Dropped) {
        batch.check_dropped(i, j);
      }
    }
  }
}

}  // namespace poise

// Which rows of blocks, on the host and on the device, an iteration's mini-batches store and load, and what follows for
// their order.

#include <algorithm>

#include "common/trouble.h"
#include "gpu_executor/order_check/order_check.h"

namespace poise {
namespace {

struct Stored {
  std::uint64_t block;  // place above kind above number
  std::uint16_t rows;   // one bit each
  std::uint32_t mini_batch;
};

std::uint64_t key(messages::Kind kind, messages::Place place, std::uint32_t block) {
  return static_cast<std::uint64_t>(place) << 40 | static_cast<std::uint64_t>(kind) << 32 | block;
}
const char* kind_of(std::uint64_t key) {
  return messages::EnumNameKind(static_cast<messages::Kind>(key >> 32 & 0xff));
}

std::vector<Stored> all_stores(const messages::Iteration& iteration) {
  std::vector<Stored> stores;
  for (const messages::MiniBatch* batch : *iteration.mini_batches()) {
    if (batch->stores() == nullptr) {
      continue;
    }
    for (const messages::Store* store : *batch->stores()) {
      const std::uint32_t rows = ((1u << store->count()) - 1) << store->token();
      stores.push_back({.block = key(store->kind(), store->place(), store->block()),
                        .rows = static_cast<std::uint16_t>(rows),
                        .mini_batch = batch->id()});
    }
  }
  std::ranges::stable_sort(stores, {}, &Stored::block);
  return stores;
}

// The blocks of which a mini-batch reads rows that stand there already: loads, or in place on the host.
std::vector<messages::BlockRun> reads_of(const messages::MiniBatch& batch) {
  std::vector<messages::BlockRun> reads;
  if (batch.loads() != nullptr) {
    for (const messages::BlockRun* run : *batch.loads()) {
      reads.push_back(*run);
    }
  }
  if (!is_on_host(batch)) {
    return reads;
  }
  for (const messages::Sequence* sequence : *batch.sequences()) {
    for (std::uint32_t first = 0; first < sequence->context(); first += kBlockTokens) {
      const messages::AttentionEntry& entry =
          *batch.entries()->Get(sequence->first_entry() + first / kBlockTokens);
      if (entry.place() == messages::Place::Dropped) {
        continue;
      }
      const auto tokens = static_cast<std::uint16_t>(
          std::min<std::uint32_t>(sequence->context() - first, kBlockTokens));
      reads.emplace_back(entry.kind(), entry.place(), tokens, 1, entry.block(), 0);
    }
  }
  return reads;
}

void check_once(const std::vector<Stored>& stores) {
  std::uint32_t rows = 0;
  for (std::size_t i = 0; i < stores.size(); ++i) {
    rows = i > 0 && stores[i].block == stores[i - 1].block ? rows : 0;
    if ((rows & stores[i].rows) != 0) {
      fail("mini-batch {} stores rows of {} block {} that are stored already", stores[i].mini_batch,
           kind_of(stores[i].block), stores[i].block & UINT32_MAX);
    }
    rows |= stores[i].rows;
  }
}

}  // namespace

StoreDependencies check_block_hazards(const messages::Iteration& iteration) {
  const std::vector<Stored> stores = all_stores(iteration);
  check_once(stores);
  StoreDependencies after(iteration.mini_batches()->size());
  for (const messages::MiniBatch* batch : *iteration.mini_batches()) {
    std::vector<std::uint32_t>& before = after[batch->id()];
    for (const messages::BlockRun& run : reads_of(*batch)) {
      const std::uint64_t first = key(run.kind(), run.place(), run.first_block());
      const std::uint64_t last = first + run.count() - 1;
      for (auto stored = std::ranges::lower_bound(stores, first, {}, &Stored::block);
           stored != stores.end() && stored->block <= last; ++stored) {
        const std::uint32_t tokens = stored->block == last ? run.tail_tokens() : kBlockTokens;
        if ((stored->rows & ((1u << tokens) - 1)) == 0) {
          continue;
        }
        if (stored->mini_batch >= batch->id()) {
          fail("mini-batch {} loads rows of {} block {} that mini-batch {} only stores",
               batch->id(), messages::EnumNameKind(run.kind()), stored->block & UINT32_MAX,
               stored->mini_batch);
        }
        // Host cores may begin before anything else of a layer, but work in order.
        if (is_on_host(*batch) && !is_on_host(*iteration.mini_batches()->Get(stored->mini_batch))) {
          fail(
              "host cores attend mini-batch {}, which reads rows of {} block {} that the device "
              "stores for mini-batch {} in the same iteration",
              batch->id(), messages::EnumNameKind(run.kind()), stored->block & UINT32_MAX,
              stored->mini_batch);
        }
        before.push_back(stored->mini_batch);
      }
    }
    std::ranges::sort(before);
    const auto repeated = std::ranges::unique(before);
    before.erase(repeated.begin(), repeated.end());
  }
  return after;
}

}  // namespace poise

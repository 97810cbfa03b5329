#include "planner/virtual_time/batch_cost.h"

#include <algorithm>

#include "common/windows/unseen_blocks.h"
#include "planner/costs/prefill_pairs.h"

namespace poise {
namespace {

double tokens_of(const messages::BlockRun& run) {
  return (run.count() - 1.0) * kBlockTokens + run.tail_tokens();
}

// How many blocks KV Gen makes at a time; 0: all. Keys and values that become codes pass through a buffer of a
// mini-batch's rows (DeviceSizes::plain_kv).
double made_at_once(const DeviceLimits& limits) {
  return limits.kv_format == KvFormat::plain
             ? 0
             : std::max(1.0, static_cast<double>(limits.max_mini_batch_rows) / kBlockTokens);
}

// Blocks are read as far as they hold rows.
BatchCost cost_on_host(const Profile& profile, const messages::MiniBatchT& batch,
                       std::int32_t window) {
  double rows = 0;
  for (const messages::Sequence& sequence : batch.sequences) {
    rows += static_cast<double>(sequence.context() + sequence.new_tokens()) -
            unseen_blocks(sequence.context(), window) * kBlockTokens;
  }
  const double blocks = rows / kBlockTokens;
  const auto new_rows = static_cast<double>(batch.tokens.size());
  return {.on_host = true,
          .host = profile.host_attention(blocks),
          .host_alone = profile.host_alone(blocks),
          .up = profile.host_up(new_rows),
          .host_rows = new_rows,
          .host_blocks = blocks};
}

// Entries of a mini-batch that its rows attend as activations, and those rows.
struct Absorbed {
  double blocks = 0, rows = 0;
};
Absorbed absorbed_by(const messages::MiniBatchT& batch) {
  Absorbed absorbed;
  for (const messages::Sequence& sequence : batch.sequences) {
    const double before = absorbed.blocks;
    for (std::uint32_t block = 0;
         sequence.new_tokens() == 1 && block * kBlockTokens <= sequence.context(); ++block) {
      absorbed.blocks +=
          batch.entries[sequence.first_entry() + block].where() == messages::Where::Activation ? 1
                                                                                               : 0;
    }
    absorbed.rows += absorbed.blocks > before ? 1 : 0;
  }
  return absorbed;
}

}  // namespace

BatchCost batch_cost(const Profile& profile, const messages::MiniBatchT& batch,
                     const DeviceLimits& limits, std::int32_t window) {
  if (!batch.entries.empty() && batch.entries[0].where() == messages::Where::HostInPlace) {
    return cost_on_host(profile, batch, window);
  }
  const SeenLines seen = window > 0 ? seen_lines(BlockTables(batch), window) : SeenLines();
  double kv = 0, act = 0, here = 0, regenerated = 0, decoded = 0, pairs = 0, prompts = 0;
  for (std::size_t i = 0; i < batch.loads.size(); ++i) {
    const messages::BlockRun& run = batch.loads[i];
    if (window > 0 && !seen.loads[i]) {
      continue;
    }
    const bool is_kv = run.kind() == messages::Kind::Kv;
    if (run.place() != messages::Place::Gpu) {
      (is_kv ? kv : act) += tokens_of(run) / kBlockTokens;
    } else if (!is_kv) {  // KV blocks there are read where they lie
      here += tokens_of(run) / kBlockTokens;
    }
  }
  for (std::size_t i = 0; i < batch.regenerate.size(); ++i) {
    regenerated += window > 0 && !seen.regenerate[i] ? 0 : batch.regenerate[i].count();
  }
  for (const messages::Sequence& sequence : batch.sequences) {
    pairs += prefill_pairs(sequence, window);
    prompts += sequence.new_tokens() > 1 ? sequence.new_tokens() : 0;
    decoded += sequence.new_tokens() == 1
                   ? static_cast<double>(ceil_div(sequence.context() + 1, kBlockTokens) -
                                         unseen_blocks(sequence.context(), window))
                   : 0;
  }
  const Absorbed absorbed = limits.absorption ? absorbed_by(batch) : Absorbed();
  BatchCost costs{.load_act = profile.load_act(act),
                  .load_kv = profile.load_kv(kv),
                  .here = profile.load_here(here),
                  .regenerate = profile.kv_gen_of(regenerated, made_at_once(limits)),
                  .attend = profile.attention_beside(here > 0)(decoded - absorbed.blocks) +
                            profile.absorb_of(absorbed.blocks, absorbed.rows) +
                            profile.prefill_of(pairs, prompts),
                  .kv = kv,
                  .act = act};
  for (const auto& store : batch.stores) {
    if (store.place() == messages::Place::Host) {
      (store.kind() == messages::Kind::Kv ? costs.stored_kv : costs.stored_act) += store.count();
    }
  }
  return costs;
}

}  // namespace poise

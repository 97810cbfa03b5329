#include "planner/profile/profiling.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <numeric>

#include "common/trouble.h"
#include "common/weight_layout.h"
#include "common/windows/unseen_blocks.h"
#include "planner/memory/sizes.h"

namespace poise {
namespace {

constexpr int kSizes = 8;                 // of blocks in the context works
constexpr int kBusyRepeats = 6 * kSizes;  // of the largest, beside them
constexpr std::int32_t kRepeatSizes = 24, kRepeatSteps = 72;
constexpr double kRepeat = 0.84;        // of the largest, on average
constexpr std::int32_t kSequences = 8;  // a mini-batch's blocks are shared out among
constexpr std::int32_t kProfiledLogits = 256;
constexpr std::int32_t kFewAbsorbingRows = 2;  // where there are few blocks
constexpr std::int32_t kHereBlocks = 16;  // ACT blocks on the device
// Host cores: the most sequences of a mini-batch, and the shares of them that the others have, in sixteenths. Each sequence
// writes its new row to a block of its own (`tail`). From some thirty sequences on, cores read runs of memory as long as in a
// run: with 4 sequences they reached two thirds of the speed.
constexpr std::int32_t kMaxHostSequences = 32;
constexpr std::array<std::int32_t, 6> kHostSequenceShares{16, 12, 8, 4, 2, 1};
constexpr std::uint32_t kHostTails =
    kMaxHostSequences *
    std::accumulate(kHostSequenceShares.begin(), kHostSequenceShares.end(), 0) / 16;
// Of each, at most. With 16, cores read a sixth slower than in a run. With 32 they attended 2.6 ms at a time, and the link
// beside them carried 48 to 50 GB/s; beside the 8 ms of a run it has 45 to 46.
constexpr std::int32_t kHostSequenceBlocks = 64;
// Neighbours' rows are together more than a mini-batch's buffers hold, so that each is a group of its
// own; in parts of the largest, 0 for a single row. One part is few rows, which products have a way of
// their own for (kernels/cuda/gemm.h); from half of the largest on there is a size for every two
// parts, since with each tile of rows a product's time rises in steps.
constexpr std::int32_t kPromptParts = 32;
constexpr std::array<std::int32_t, 15> kPromptSizes{0,  32, 1,  32, 4,  32, 8, 28,
                                                    16, 20, 18, 24, 22, 26, 30};

constexpr double kLate = 20e-6;  // seconds
constexpr double kShortestTime = 1e-9;

std::int32_t context_blocks(const DeviceLimits& limits) {
  return std::max(1, limits.max_context / kBlockTokens);
}

std::int32_t size_of_step(std::int32_t most, int step) {  // 1 .. kSizes
  return std::max(1, most * step / kSizes);
}

// Of 576 blocks: every eighth from there down to 392, and again.
std::int32_t size_of_repeat(std::int32_t most, std::int32_t i) {
  return std::max(1, most - most * (i % kRepeatSizes) / kRepeatSteps);
}

std::vector<std::int32_t> prompt_rows(std::int32_t most) {
  std::vector<std::int32_t> rows;
  for (const std::int32_t parts : kPromptSizes) {
    rows.push_back(std::max(1, most * parts / kPromptParts));
  }
  return rows;
}

// Largest loads in a layer during which host cores attend all of theirs: twice as many blocks as these have. Every other load
// is of ACT blocks, which may take half as long.
constexpr double kLoadsBesideHost = 2;
constexpr std::int32_t kMaxLoads = 4 * kSizes;  // what the buffers for rows hold beside host cores' own

// Blocks that host cores read of a layer, of all mini-batches together. With the largest scale's number each mini-batch reads
// others, and the first reads memory that no cache holds; with fewer, mini-batches share them.
std::int64_t host_bodies(ProfileScale scale) {
  static_assert(kLargestProfileScale.host_blocks == std::int64_t{kHostTails} * kHostSequenceBlocks);
  return std::max({scale.host_blocks, scale.blocks, kMaxHostSequences});
}

// The sequences of the largest of these mini-batches, and the blocks of each, with the one that it writes to.
struct HostSequences {
  std::int32_t most;
  std::uint32_t blocks;
};
HostSequences host_sequences(const ProfileSizes& sizes) {
  constexpr std::int64_t kShort = 16;  // blocks: shorter sequences say too little, so mini-batches rather share some
  const std::int64_t bodies =
      std::min(std::int64_t{sizes.host.kv_blocks} - kHostTails, host_bodies(sizes.scale));
  const auto outlasted =
      static_cast<std::int64_t>(kMaxLoads * sizes.scale.blocks / (kLoadsBesideHost * kHostTails));
  const std::int64_t blocks = std::min(
      std::max(bodies / kHostTails, std::min(kShort, bodies / kMaxHostSequences)), outlasted);
  return {.most = std::min(kMaxHostSequences, sizes.device.max_sequences),
          .blocks = static_cast<std::uint32_t>(std::clamp<std::int64_t>(
              blocks, 1, std::min(kHostSequenceBlocks, context_blocks(sizes.device))))};
}

std::int32_t loads_beside_host(const ProfileSizes& sizes) {
  const double attended = kHostTails * static_cast<double>(host_sequences(sizes).blocks);
  return std::clamp(
      static_cast<std::int32_t>(std::ceil(kLoadsBesideHost * attended / sizes.scale.blocks)), 1,
      kMaxLoads);
}

// A run or entry of one kind and place.
struct Blocks {
  messages::Kind kind;
  messages::Place place;
  std::uint32_t pool;  // number of blocks
};

// Mini-batches one behind the other.
class Tables {
 public:
  Tables(const ProfileSizes& sizes, const ModelShape& shape) : sizes_(sizes), shape_(shape) {}

  // One-row sequences that load `n` blocks between them, the last row of each block's last aside:
  // that is the new one.
  void add_context(const Blocks& blocks, std::int32_t n) { add_context({{blocks, n}}); }
  // Blocks of one kind from several places, which share the sequences.
  void add_context(std::initializer_list<std::pair<Blocks, std::int32_t>> parts) {
    auto batch = begin();
    std::uint32_t slot = 0;
    for (const auto& [blocks, n] : parts) {
      add_sequences(*batch, blocks, n, kSequences / static_cast<std::int32_t>(parts.size()), slot);
    }
    if (parts.begin()->first.kind == messages::Kind::Act) {
      batch->regenerate.emplace_back(0, slot);
    }
    end(std::move(batch));
  }

  // Loads `n` blocks, of which one-row sequences attend but a few: the link never waits for the device.
  void add_loads(const Blocks& blocks, std::int32_t n) {
    auto batch = begin();
    std::uint32_t slot = 0;
    const std::int32_t attended = std::min(n, kSequences);
    add_sequences(*batch, blocks, attended, attended, slot);
    if (blocks.kind == messages::Kind::Act) {
      batch->regenerate.emplace_back(0, slot);
    }
    for (auto left = static_cast<std::uint32_t>(n - attended); left > 0;) {
      const Run run = next_run(blocks, left);
      batch->loads.emplace_back(blocks.kind, blocks.place, std::uint16_t{kBlockTokens}, run.count,
                                run.first, slot);
      slot += run.count;
      left -= run.count;
    }
    end(std::move(batch));
  }

  // One-row sequences of `count` blocks that host cores attend. The last blocks of the pool are those into which they
  // write.
  void add_on_host(const Blocks& kv, std::int32_t sequences, std::uint32_t count) {
    auto batch = begin();
    const std::uint32_t bodies = kv.pool - kHostTails;
    for (std::int32_t i = 0; i < sequences; ++i) {
      const auto row = static_cast<std::uint32_t>(batch->tokens.size());
      batch->sequences.emplace_back(next_request_++, count * kBlockTokens - 1, 1, row,
                                    static_cast<std::uint32_t>(batch->entries.size()));
      batch->prompt_tokens.push_back(count * kBlockTokens - 1);
      batch->tokens.push_back(token());
      const std::uint32_t tail = bodies + next_tail_++;
      for (std::uint32_t j = 0; j < count; ++j) {
        batch->entries.emplace_back(messages::Where::HostInPlace, kv.kind, kv.place, 0, 0,
                                    j + 1 < count ? next_block_++ % bodies : tail);
      }
      batch->stores.emplace_back(kv.kind, kv.place, kBlockTokens - 1, 1, row, tail);
    }
    end(std::move(batch));
  }

  // One-row sequences, which share the blocks and attend them as they are.
  void add_absorbed(const Blocks& act, std::int32_t n, std::int32_t sequences) {
    auto batch = begin();
    std::uint32_t slot = 0;
    add_sequences(*batch, act, n, sequences, slot);
    for (messages::AttentionEntry& entry : batch->entries) {
      entry = messages::AttentionEntry(messages::Where::Activation, entry.kind(), entry.place(), 0,
                                       entry.slot(), entry.block());
    }
    end(std::move(batch));
  }

  // The next blocks are those from `block` on.
  void go_to_block(std::uint32_t block) { next_block_ = block; }

  // New sequences of `rows` rows together, of which `stored` go to blocks that no other sequence uses.
  void add_prompts(const Blocks& blocks, std::int32_t rows, std::int32_t stored) {
    auto batch = begin();
    const std::int32_t longest = std::min(kProfiledPrompt, sizes_.device.max_context);
    std::uint32_t slot = 0;
    for (std::int32_t row = 0; row < rows;) {
      const std::int32_t tokens = std::min(longest, rows - row);
      batch->sequences.emplace_back(next_request_++, 0, static_cast<std::uint32_t>(tokens),
                                    static_cast<std::uint32_t>(row),
                                    static_cast<std::uint32_t>(batch->entries.size()));
      batch->prompt_tokens.push_back(static_cast<std::uint32_t>(tokens));
      for (std::int32_t begin = 0; begin < tokens; begin += kBlockTokens) {
        const std::int32_t count = std::min({kBlockTokens, tokens - begin, stored});
        const std::uint32_t block = count > 0 ? next_block_++ : 0;
        check(block < blocks.pool, "the pool has a block for each that is stored");
        batch->entries.emplace_back(where(blocks.kind), blocks.kind, blocks.place, 0, slot++,
                                    block);
        if (count > 0) {
          batch->stores.emplace_back(blocks.kind, blocks.place, 0,
                                     static_cast<std::uint32_t>(count),
                                     static_cast<std::uint32_t>(row + begin), block);
          stored -= count;
        }
      }
      for (std::int32_t i = 0; i < tokens; ++i) {
        batch->tokens.push_back(token());
      }
      row += tokens;
    }
    end(std::move(batch));
  }

  // Number of sequences for which a token is sampled, at least one.
  messages::IterationT finish(std::uint64_t iteration, std::uint64_t pool_epoch, double share) {
    std::int64_t sequences = 0;
    for (const auto& batch : tables_.mini_batches) {
      sequences += std::ssize(batch->sequences);
    }
    auto left = std::max<std::int64_t>(1, std::llround(share * static_cast<double>(sequences)));
    for (auto& batch : tables_.mini_batches) {
      for (std::uint32_t i = 0; i < batch->sequences.size() && left > 0; ++i, --left) {
        auto sample = std::make_unique<messages::SampleT>();
        sample->sequence = i;
        sample->temperature = 0;
        batch->samples.push_back(std::move(sample));
      }
    }
    tables_.iteration = iteration;
    tables_.pool_epoch = pool_epoch;
    return std::move(tables_);
  }

 private:
  static messages::Where where(messages::Kind kind) {
    return kind == messages::Kind::Kv ? messages::Where::LoadedKv : messages::Where::RegeneratedKv;
  }
  // The next blocks, at most `most`: up to the end of the pool, behind which they begin anew.
  struct Run {
    std::uint32_t first, count;
  };
  Run next_run(const Blocks& blocks, std::uint32_t most) {
    const std::uint32_t first = next_block_ % blocks.pool;
    const std::uint32_t count = std::min(most, blocks.pool - first);
    next_block_ += count;
    return {first, count};
  }
  void add_sequences(messages::MiniBatchT& batch, const Blocks& blocks, std::int32_t n,
                     std::int32_t wished, std::uint32_t& slot) {
    const std::int32_t sequences = std::max(
        std::min(n, wished), static_cast<std::int32_t>(ceil_div(n, context_blocks(sizes_.device))));
    for (std::int32_t i = 0; i < sequences; ++i) {
      const std::int32_t share = n * (i + 1) / sequences - n * i / sequences;
      const auto count = static_cast<std::uint32_t>(share);
      batch.sequences.emplace_back(next_request_++, count * kBlockTokens - 1, 1,
                                   static_cast<std::uint32_t>(batch.tokens.size()),
                                   static_cast<std::uint32_t>(batch.entries.size()));
      batch.prompt_tokens.push_back(count * kBlockTokens - 1);
      batch.tokens.push_back(token());
      for (std::uint32_t left = count; left > 0;) {
        const auto [first, run] = next_run(blocks, left);
        const bool last = run == left;
        batch.loads.emplace_back(blocks.kind, blocks.place,
                                 static_cast<std::uint16_t>(kBlockTokens - (last ? 1 : 0)), run,
                                 first, slot);
        for (std::uint32_t j = 0; j < run; ++j) {
          batch.entries.emplace_back(where(blocks.kind), blocks.kind, blocks.place, 0, slot + j,
                                     first + j);
        }
        slot += run;
        left -= run;
      }
    }
  }

  TokenId token() { return static_cast<TokenId>(next_token_++ % unsigned(shape_.vocab_size)); }
  std::unique_ptr<messages::MiniBatchT> begin() const {
    auto batch = std::make_unique<messages::MiniBatchT>();
    batch->id = static_cast<std::uint32_t>(tables_.mini_batches.size());
    return batch;
  }
  void end(std::unique_ptr<messages::MiniBatchT> batch) {
    tables_.mini_batches.push_back(std::move(batch));
  }

  const ProfileSizes& sizes_;
  const ModelShape& shape_;
  messages::IterationT tables_;
  std::uint32_t next_block_ = 0, next_request_ = 0, next_token_ = 0, next_tail_ = 0;
};

DeviceLimits limits_for(const ModelShape& shape, ProfileScale scale, bool on_host) {
  // Within a window, all layers do the same work.
  const std::int32_t window = window_of(windows_of(shape));
  const std::int32_t longest =
      window > 0 ? std::min(window, shape.max_position_embeddings) : shape.max_position_embeddings;
  const std::int32_t positions = longest / kBlockTokens * kBlockTokens;
  DeviceLimits limits;
  std::int64_t rows = 0;
  for (const std::int32_t one : prompt_rows(scale.rows)) {
    rows += one;
  }
  limits.max_context = std::max(std::min(positions, scale.blocks * kBlockTokens), kBlockTokens);
  // Of blocks from two places, each place's are shared out among at least half of kSequences.
  const std::int32_t sequences = std::max(
      kSequences,
      static_cast<std::int32_t>(ceil_div(scale.blocks, context_blocks(limits))) + kSequences / 2);
  const std::int64_t prompts = ceil_div(scale.rows, std::min(kProfiledPrompt, limits.max_context));
  limits.max_rows =
      static_cast<std::int32_t>(std::max<std::int64_t>(rows, (kBusyRepeats + kSizes) * sequences));
  limits.max_mini_batch_rows = std::max(scale.rows, sequences);
  limits.max_sequences = std::max(
      {sequences, static_cast<std::int32_t>(prompts),
       on_host ? std::min(kMaxHostSequences, limits.max_mini_batch_rows) : 0});
  limits.act_slots = limits.kv_slots = std::max(
      scale.blocks, static_cast<std::int32_t>(ceil_div(scale.rows, kBlockTokens) + prompts));
  limits.logits_rows = kProfiledLogits;
  limits.gpu_act_blocks = kHereBlocks;
  return limits;
}

// The blocks that a profile's iterations use, by kind and place.
struct Kinds {
  Blocks kv, act, here;

  explicit Kinds(const ProfileSizes& sizes)
      : kv{messages::Kind::Kv, messages::Place::Host, sizes.host.kv_blocks},
        act{messages::Kind::Act, messages::Place::Host, sizes.host.act_blocks},
        here{messages::Kind::Act, messages::Place::Gpu, sizes.host.gpu_act_blocks} {}
};

// What each ProfileWork puts into an iteration's tables.

void add_on_host(Tables& tables, const ProfileSizes& sizes, const Kinds& kinds) {
  const auto [most, count] = host_sequences(sizes);
  for (const std::int32_t share : kHostSequenceShares) {
    if (const std::int32_t sequences = most * share / 16; sequences > 0) {
      tables.add_on_host(kinds.kv, sequences, count);
    }
  }
}

void add_on_host_beside_loads(Tables& tables, const ProfileSizes& sizes, const Kinds& kinds) {
  Blocks loaded = kinds.kv;  // what host cores write is not loaded before
  loaded.pool -= kHostTails;
  for (std::int32_t i = 0; i < loads_beside_host(sizes); ++i) {
    tables.add_loads(i % 2 == 0 ? loaded : kinds.act, sizes.scale.blocks);
  }
  tables.go_to_block(loaded.pool / 2);  // far from where the loads are
  add_on_host(tables, sizes, kinds);
}

void add_absorbed(Tables& tables, const ProfileSizes& sizes, const Kinds& kinds) {
  for (std::int32_t rows = std::min(kSequences, sizes.device.act_slots); rows >= 1; rows /= 2) {
    tables.add_absorbed(kinds.act, rows, rows);
  }
  // At least two blocks a row, and no row of more than a context.
  const std::int32_t rows = sizes.absorbing_rows;
  for (int step = kSizes; step >= 1; --step) {
    const std::int32_t n =
        std::min(size_of_step(sizes.scale.blocks, step), rows * context_blocks(sizes.device));
    if (n >= 2 * rows) {
      tables.add_absorbed(kinds.act, n, rows);
    }
  }
}

void add_busy(Tables& tables, const ProfileSizes& sizes, const Kinds& kinds) {
  const auto add = [&](std::int32_t n) {
    const auto crossing = static_cast<std::int32_t>(n * sizes.busy.from_host);
    tables.add_context({{kinds.act, crossing}, {kinds.here, n - crossing}});
  };
  for (std::int32_t i = 0; i < sizes.busy.repeats; ++i) {
    add(size_of_repeat(sizes.busy.blocks, i));
  }
  for (int step = kSizes; step >= 1; --step) {
    add(size_of_step(sizes.scale.blocks, step));
  }
}

void add_context_of_each_kind(Tables& tables, const ProfileSizes& sizes, const Kinds& kinds,
                              bool apart) {
  for (int step = kSizes; step >= 1; --step) {
    for (const Blocks& kind : {kinds.kv, kinds.act, kinds.here}) {
      tables.add_context(kind, size_of_step(sizes.scale.blocks, step));
      if (apart) {
        tables.add_context(kinds.kv, 1);
      }
    }
  }
}

void add_prompts_here(Tables& tables, const ProfileSizes& sizes, const Blocks& here) {
  // By the largest mini-batches, each of which begins blocks of its own.
  std::int32_t left = static_cast<std::int32_t>(here.pool) * kBlockTokens;
  for (const std::int32_t one : prompt_rows(sizes.scale.rows)) {
    const std::int32_t stored = one == sizes.scale.rows ? std::min(one, left) : 0;
    tables.add_prompts(here, one, stored);
    left -= static_cast<std::int32_t>(round_up(stored, kBlockTokens));
  }
}

void add_prompts(Tables& tables, const ProfileSizes& sizes, const Blocks& kind) {
  const std::vector<std::int32_t> rows = prompt_rows(sizes.scale.rows);
  double all = 0;
  for (const std::int32_t one : rows) {
    all += one;
  }
  const double room = (kind.pool - static_cast<double>(rows.size())) * kBlockTokens;
  for (const std::int32_t one : rows) {
    const auto stored = static_cast<std::int64_t>(std::clamp(room / all, 0.0, 1.0) * one);
    // Whole blocks, for which `room` has left a block each.
    tables.add_prompts(
        kind, one,
        static_cast<std::int32_t>(std::min<std::int64_t>(one, round_up(stored, kBlockTokens))));
  }
}

}  // namespace

ProfileSizes profile_sizes(const ModelShape& shape, DType dtype, ProfileScale scale,
                           Bytes host_bytes, Bytes overhead, Bytes cap, KvFormat kv_format,
                           Bytes on_host, bool absorbs) {
  if (shape.max_position_embeddings < kBlockTokens) {
    fail("a model of {} positions, fewer than a block has, is not measured",
         shape.max_position_embeddings);
  }
  const BlockSizes blocks = block_sizes(shape, dtype, kv_format);
  const Bytes pair =
      (blocks.block(BlockKind::kv) + blocks.block(BlockKind::act)) * shape.num_hidden_layers;
  // Every mini-batch of prompts begins a block that it does not fill.
  const std::int64_t wanted =
      std::max<std::int64_t>(scale.rows / kBlockTokens, 4) + std::ssize(kPromptSizes);
  const std::int64_t pool = std::clamp<std::int64_t>(host_bytes / pair, 2, wanted);
  const std::int64_t attended =
      std::min(on_host / (blocks.block(BlockKind::kv) * shape.num_hidden_layers),
               host_bodies(scale) + kHostTails);
  const bool attends = attended >= std::int64_t{kMaxHostSequences} + kHostTails;
  ProfileSizes sizes{.scale = scale, .host = {}, .device = limits_for(shape, scale, attends)};
  sizes.device.kv_format = kv_format;
  sizes.device.absorption = absorbs;
  while (device_memory(shape, dtype, sizes.device, overhead) > cap &&
         (sizes.scale.blocks > 1 || sizes.scale.rows > kSequences)) {
    sizes.scale.blocks = std::max(1, sizes.scale.blocks / 2);
    sizes.scale.rows = std::max(kSequences, sizes.scale.rows / 2);
    sizes.device = limits_for(shape, sizes.scale, attends);
    sizes.device.kv_format = kv_format;
    sizes.device.absorption = absorbs;
    sizes.device.logits_rows = std::min(kProfiledLogits, sizes.scale.rows);
  }
  sizes.host = {.act_blocks = static_cast<std::uint32_t>(pool),
                .kv_blocks = static_cast<std::uint32_t>(attends ? std::max(pool, attended) : pool),
                .gpu_act_blocks = kHereBlocks};
  sizes.device.host_attention = attends;
  sizes.absorbing_rows = !absorbs                                   ? 0
                         : sizes.scale.blocks >= 4 * kSequences ? kSequences
                                                                : kFewAbsorbingRows;
  // Layers that stay need not be streamed again and again; a few that are streamed tell the price:
  // more than have a buffer, or none would be brought twice.
  constexpr std::int32_t kStreamed = 4;
  sizes.device = with_resident_layers(shape, dtype, sizes.device, overhead, cap);
  sizes.device.resident_layers =
      std::min(sizes.device.resident_layers, std::max(0, shape.num_hidden_layers - kStreamed));
  return sizes;
}

messages::IterationT profile_iteration(ProfileWork work, const ProfileSizes& sizes,
                                       const ModelShape& shape, std::uint64_t iteration,
                                       std::uint64_t pool_epoch, int round, int rounds) {
  const Kinds kinds(sizes);
  Tables tables(sizes, shape);
  double share = 0;
  switch (work) {
    case ProfileWork::context_host:
      add_on_host(tables, sizes, kinds);
      break;
    case ProfileWork::context_host_link:
      add_on_host_beside_loads(tables, sizes, kinds);
      break;
    case ProfileWork::context_absorbed:
      add_absorbed(tables, sizes, kinds);
      break;
    case ProfileWork::context_busy:
      add_busy(tables, sizes, kinds);
      break;
    case ProfileWork::context_few:
      // A small cap may leave fewer slots.
      tables.add_context(kinds.kv,
                         round % 2 == 0 ? std::min(kSequences, sizes.device.kv_slots) : 1);
      share = 1;
      break;
    case ProfileWork::context_apart:
      add_context_of_each_kind(tables, sizes, kinds, true);
      share = (2 * round + 1.0) / (2.0 * rounds);
      break;
    case ProfileWork::context_together:
      add_context_of_each_kind(tables, sizes, kinds, false);
      share = (2 * round + 2.0) / (2.0 * rounds);
      break;
    case ProfileWork::prompts_here:
      add_prompts_here(tables, sizes, kinds.here);
      break;
    case ProfileWork::prompts_kv:
      add_prompts(tables, sizes, kinds.kv);
      break;
    case ProfileWork::prompts_act:
      add_prompts(tables, sizes, kinds.act);
      break;
  }
  return tables.finish(iteration, pool_epoch, share);
}

bool measures(ProfileWork work, Line Profile::*line) {
  const auto among = [&](std::initializer_list<Line Profile::*> lines) {
    return std::ranges::find(lines, line) != lines.end();
  };
  if (among({&Profile::absorb, &Profile::absorb_rows})) {
    return work == ProfileWork::context_absorbed;
  }
  if (work == ProfileWork::context_absorbed) {
    return false;
  }
  if (among({&Profile::host_attention, &Profile::host_down, &Profile::host_up})) {
    return work == ProfileWork::context_host || work == ProfileWork::context_host_link;
  }
  const bool beside = among({&Profile::load_beside_host, &Profile::load_act_beside_host});
  if (beside || work == ProfileWork::context_host_link) {
    return beside && work == ProfileWork::context_host_link;
  }
  if (among({&Profile::load_w, &Profile::forward, &Profile::qkv, &Profile::embed})) {
    return true;
  }
  if (work == ProfileWork::context_host) {
    return false;
  }
  if (among({&Profile::store_kv})) {
    return work == ProfileWork::prompts_kv;
  }
  if (among({&Profile::store_act})) {
    return work == ProfileWork::prompts_act;
  }
  const bool prompts = work == ProfileWork::prompts_kv || work == ProfileWork::prompts_act;
  return prompts == among({&Profile::prefill});
}

BusyWork busy_work(const Profile& profile, std::int32_t blocks, std::int32_t layers,
                   std::int32_t streamed) {
  constexpr double kNotQuite = 0.85;   // of the time that computing takes, the link's
  constexpr double kBlocksPart = 0.4;  // of that time, for blocks where weights are brought, too
  constexpr double kLongest = 2;       // seconds of an iteration
  const double kv_gen = profile.kv_gen.b;
  if (kv_gen <= 0 || profile.load_act.b <= 0) {
    return {};
  }
  const double part = streamed > 0 ? kBlocksPart : kNotQuite;
  double wanted = streamed > 0 ? profile.load_w(1).n / (kNotQuite - kBlocksPart) / kv_gen : 0;
  wanted = std::min(wanted, kLongest / (layers * kv_gen));
  return {.repeats = static_cast<std::int32_t>(
              std::clamp(std::ceil(wanted / (kRepeat * blocks)), 0.0, double{kBusyRepeats})),
          .blocks = blocks,
          .from_host = std::clamp(part * kv_gen / profile.load_act.b, 0.0, 1.0)};
}

Seconds time_of(const BusyWork& busy, const Profile& profile, std::int32_t layers) {
  const double sizes = kRepeat * busy.repeats + (kSizes + 1) / 2.0;  // of the largest
  return {layers * sizes * profile.kv_gen(busy.blocks).n};
}

ProfileScale profile_scale(const Profile& first, std::int32_t layers, Seconds budget) {
  constexpr double kContextSizes = (kSizes + 1) / 2.0;  // of the largest, all sizes of one kind
  const double each = budget.n / layers;
  const double block = kContextSizes * (std::max(first.load_kv.b, first.attention.b) +
                                        std::max(first.load_act.b + first.load_here.b,
                                                 2 * (first.kv_gen.b + first.attention.b)));
  const double rows = std::accumulate(kPromptSizes.begin(), kPromptSizes.end(), 0.0) / kPromptParts;
  const double row = rows * first.forward.b;
  const auto scaled = [&](double cost, std::int32_t least, std::int32_t most) {
    // Whole eighths, so that every size is another.
    return static_cast<std::int32_t>(std::clamp(each / cost, double(least), double(most))) / 8 * 8;
  };
  const ProfileScale least = first_profile_scale(first.kind);
  ProfileScale scale{.blocks = scaled(block, least.blocks, kLargestProfileScale.blocks),
                     .rows = scaled(row, least.rows, kLargestProfileScale.rows)};
  if (first.kind != DeviceKind::cpu) {
    scale.host_blocks = kLargestProfileScale.host_blocks;
  }
  return scale;
}

std::vector<std::size_t> far_points(std::span<const Point> points) {
  std::vector<std::size_t> far, left(points.size());
  std::iota(left.begin(), left.end(), std::size_t{0});
  // The furthest one first: it drags the line away from others, too.
  while (left.size() > 2) {
    std::size_t furthest = left.size();
    double most = 0;
    for (std::size_t i = 0; i < left.size(); ++i) {
      std::vector<Point> others;
      for (const std::size_t other : left) {
        if (other != left[i]) {
          others.push_back(points[other]);
        }
      }
      const Line line = fit_line(others);
      const auto distance = [&](const Point& point) {  // in proportion, up as far as down
        return std::abs(std::log(std::max(point.time.n, kShortestTime) / line(point.n).n));
      };
      std::vector<double> distances;
      std::ranges::transform(others, std::back_inserter(distances), distance);
      std::ranges::sort(distances);
      const Point& point = points[left[i]];
      const double own = distance(point);
      if (own > std::max({5 * distances[distances.size() / 2], 0.1, most}) &&
          std::abs(point.time.n - line(point.n).n) > kLate) {
        furthest = i;
        most = own;
      }
    }
    if (furthest == left.size()) {
      break;
    }
    far.push_back(left[furthest]);
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(furthest));
  }
  std::ranges::sort(far);
  return far;
}

}  // namespace poise

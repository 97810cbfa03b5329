#include "planner/memory/sizes.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "common/trouble.h"
#include "common/words.h"
#include "planner/policies/allocation.h"
#include "planner/schedule/block_table.h"
#include "planner/virtual_time/rehearsal.h"

namespace poise {
namespace {

constexpr std::int32_t kMiniBatchRows = 2048;  // where the products have reached their speed
constexpr std::int32_t kLogitsRows = 256;
// 4 MiB; a chunk of the head ends where more would come.
constexpr std::int32_t kLogitEdits = 1 << 18;
constexpr Bytes kHostReserve =
    kMiB * 64;  // for messages, tables, results, the processes themselves

std::int64_t sum_of_largest(std::vector<std::int32_t> sizes, std::int32_t count) {
  const auto end = sizes.begin() + std::min<std::ptrdiff_t>(count, std::ssize(sizes));
  std::nth_element(sizes.begin(), end == sizes.begin() ? end : end - 1, sizes.end(),
                   std::greater<>());
  std::int64_t sum = 0;
  for (auto size = sizes.begin(); size != end; ++size) {
    sum += *size;
  }
  return sum;
}

std::int32_t smaller(std::int32_t wanted, int halvings, std::int32_t least) {
  return std::max(wanted >> halvings, std::min(wanted, least));
}

// Slots of one kind's buffers: its share of the mini-batch, and at least what one request may have
// of the kind. Never more than there are blocks.
std::int32_t slots_of(std::int64_t blocks, std::int64_t all, std::int32_t total,
                      std::int32_t largest_request) {
  const double share =
      static_cast<double>(blocks) / static_cast<double>(std::max<std::int64_t>(all, 1));
  const auto wanted =
      std::max<std::int64_t>(static_cast<std::int64_t>(std::ceil(share * total)), largest_request);
  return static_cast<std::int32_t>(std::min(wanted, blocks));
}

// Slots for the prompts of requests that host cores attend afterwards: only then are their blocks brought to the
// device. As many as a mini-batch's rows fill, each request a block of its own that is not full; for a
// long prompt in parts, all of its blocks.
std::int32_t prompt_slots(std::int32_t rows, const Demand& demand, const Allocation& blocks) {
  const std::int64_t prompts = ceil_div(rows, kBlockTokens) + std::min(demand.sequences, rows);
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(std::max<std::int64_t>(prompts, demand.largest_request),
                             std::min(blocks.host_blocks, blocks.kv_blocks)));
}

// Rows of one request that run again in each iteration.
std::int32_t recompute_rows(const Allocation& blocks) { return blocks.token_blocks * kBlockTokens; }

// Nothing but blocks of requests that host cores attend.
Allocation with_host_blocks(std::int64_t blocks) {
  return {.kv_blocks = static_cast<std::uint32_t>(blocks),
          .host_share = blocks > 0 ? 1.0 : 0.0,
          .host_blocks = static_cast<std::uint32_t>(blocks)};
}

DeviceLimits limits_after(int halvings, const Demand& demand, const Allocation& blocks,
                          const BatchOptions& options) {
  const auto prompts = static_cast<std::int32_t>(std::min<std::int64_t>(
      options.prefill_tokens, std::max<std::int64_t>(demand.most_prompt_rows, 1)));
  const std::int32_t prefill = smaller(prompts, halvings, kBlockTokens);
  const std::int32_t again = recompute_rows(blocks);
  const std::int32_t rows =
      std::max(smaller(std::min(std::max(prompts, demand.sequences), kMiniBatchRows), halvings,
                       kBlockTokens),
               again > 0 ? again + kBlockTokens : 0);
  const std::int64_t tokens = smaller(options.mini_batch_tokens, halvings, kBlockTokens);
  const auto slots = static_cast<std::int32_t>(std::max<std::int64_t>(
      std::min(tokens / kBlockTokens, demand.most_blocks), demand.largest_request));
  const std::int64_t act = blocks.all_act_blocks();
  const std::int64_t kv =
      blocks.device_kv_blocks() + std::int64_t{demand.sequences} * blocks.token_blocks;
  DeviceLimits limits;
  limits.max_rows = prefill + demand.sequences * (1 + again);
  limits.max_mini_batch_rows = rows;
  limits.max_sequences = std::min(demand.sequences * (again > 0 ? 2 : 1), rows);
  limits.act_slots = slots_of(act, act + kv, slots, demand.largest_request);
  limits.kv_slots = std::max(slots_of(kv, act + kv, slots, demand.largest_request),
                             prompt_slots(rows, demand, blocks));
  limits.logits_rows = smaller(std::min(limits.max_rows, kLogitsRows), halvings, 1);
  limits.logit_edits = static_cast<std::int32_t>(std::max<std::int64_t>(
      demand.most_edits,
      std::min<std::int64_t>(std::int64_t{demand.most_edits} * limits.logits_rows, kLogitEdits)));
  limits.max_context = demand.longest_context;
  limits.sides = options.sides.value_or(kFewestSides);
  limits.kv_format = options.kv_format;
  limits.host_attention = blocks.host_share > 0;
  limits.absorption = options.absorption;
  if (blocks.placed) {
    limits.gpu_act_blocks = static_cast<std::int32_t>(blocks.gpu_act_blocks);
    limits.gpu_kv_blocks = static_cast<std::int32_t>(blocks.gpu_kv_blocks);
  }
  return limits;
}

// The limits that fit under the cap: those that the options ask for, or half of everything, and again.
DeviceLimits buffers_that_fit(const ModelShape& shape, DType dtype, const Demand& demand,
                              const Allocation& blocks, const BatchOptions& options, Bytes overhead,
                              Bytes cap) {
  DeviceLimits limits;
  for (int halvings = 0; halvings < 31; ++halvings) {
    limits = limits_after(halvings, demand, blocks, options);
    limits.resident_layers = blocks.resident_layers.value_or(0);
    if (device_memory(shape, dtype, limits, overhead) <= cap) {
      break;
    }
  }
  return limits;
}

// With the page tables for a region of these blocks in every layer.
Bytes overhead_with(const DeviceMemory& memory, const ModelShape& shape, DType dtype,
                    KvFormat kv_format, const Allocation& host) {
  const auto region =
      static_cast<std::int64_t>(region_bytes(block_sizes(shape, dtype, kv_format), host));
  return memory.overhead +
         (memory.pins_host_memory ? page_tables_of({region * shape.num_hidden_layers}) : Bytes{});
}

// If blocks exist on the device, or the user wants a share of them there, a policy that places none there
// has fewer on the host.
Allocation with_fixed(const Allocation& placed, const FixedPlacement& wished) {
  Allocation blocks = placed;
  const FixedPlacement fixed = wished.for_blocks(placed.act_blocks, placed.kv_blocks);
  if (!fixed.fixes_blocks() || placed.gpu_act_blocks + placed.gpu_kv_blocks > 0) {
    return blocks;
  }
  blocks.gpu_act_blocks = *fixed.gpu_act_blocks;
  blocks.gpu_kv_blocks = *fixed.gpu_kv_blocks;
  if (!wished.fixes_blocks()) {  // of each kind its share
    blocks.act_blocks -= blocks.gpu_act_blocks;
    blocks.kv_blocks -= blocks.gpu_kv_blocks;
    if (blocks.act_blocks + blocks.kv_blocks == 0) {  // a pool has a block
      (placed.act_blocks > 0 ? blocks.act_blocks : blocks.kv_blocks) = 1;
    }
    return blocks;
  }
  std::int64_t fewer = std::min(std::int64_t{blocks.gpu_act_blocks} + blocks.gpu_kv_blocks,
                                std::int64_t{placed.act_blocks} + placed.kv_blocks - 1);
  for (std::uint32_t* kind : {&blocks.act_blocks, &blocks.kv_blocks}) {
    const std::int64_t taken = std::clamp<std::int64_t>(fewer, 0, *kind);
    *kind -= static_cast<std::uint32_t>(taken);
    fewer -= taken;
  }
  return blocks;
}

// A search comes back to most placements: `play` is called once for each, and its answer kept. Profiles are told apart by
// where they lie, so they must outlive the result.
template <typename Time, typename Play>
auto each_once(Play play) {
  using Played = std::map<std::pair<const Profile*, Allocation>, std::optional<Time>>;
  return [play = std::move(play), played = std::make_shared<Played>()](
             const Profile& profile, const Allocation& blocks) -> std::optional<Time> {
    const auto [found, fresh] = played->try_emplace({&profile, blocks});
    if (fresh) {
      found->second = play(profile, blocks);
    }
    return found->second;
  };
}

}  // namespace

Demand demand_of(std::span<const Request* const> requests, std::int32_t max_num_seqs) {
  return demand_of(sizes_of(requests), max_num_seqs);
}

KeptContext kept_context(const ModelShape& shape, const Policy& policy) {
  return {.window = policy.runs_tokens_again() ? 0 : window_of_all(shape)};
}

namespace {

bool are_rehearsed_each(std::span<const RequestSize> requests) {
  std::int64_t answers = 0;
  bool differ = false;
  for (const RequestSize& request : requests) {
    answers += request.answer;
    if (answers > kRehearsedAnswers) {
      return false;
    }
    differ |=
        request.prompt != requests.front().prompt || request.answer != requests.front().answer;
  }
  return differ;
}

}  // namespace

Demand demand_of(std::span<const RequestSize> requests, std::int32_t max_num_seqs,
                 const KeptContext& kept, std::int32_t prefill_rows) {
  Demand demand{.requests = static_cast<std::int64_t>(requests.size()), .kept = kept};
  demand.sequences = static_cast<std::int32_t>(
      std::min<std::int64_t>(max_num_seqs, static_cast<std::int64_t>(requests.size())));
  if (are_rehearsed_each(requests)) {
    demand.each = std::make_shared<const std::vector<RequestSize>>(requests.begin(), requests.end());
  }
  std::vector<std::int32_t> blocks, together, prompts, contexts;
  for (const RequestSize& request : requests) {
    const std::int32_t all = blocks_for(request.most_context());
    blocks.push_back(kept.at_most(all));
    together.push_back(kept.between(all));
    prompts.push_back(request.prompt);
    contexts.push_back(request.most_context());
    demand.most_edits = std::max(demand.most_edits, request.edits);
    demand.longest_context = std::max(demand.longest_context, request.most_context());
    if (blocks.back() > demand.largest_request) {
      demand.largest_request = blocks.back();
      demand.largest = request.id;
    }
  }
  demand.most_prompt_rows = sum_of_largest(std::move(prompts), demand.sequences);
  demand.most_tokens = sum_of_largest(std::move(contexts), demand.sequences);
  // Only some of them run a part of their prompt at a time.
  const std::int64_t beside =
      kept.beside(std::min<std::int64_t>(prefill_rows, demand.most_prompt_rows));
  const std::int64_t all_at_once = sum_of_largest(std::move(blocks), demand.sequences);
  const std::int64_t some_at_once = sum_of_largest(std::move(together), demand.sequences) + beside;
  demand.most_blocks =
      std::max<std::int64_t>(std::min(all_at_once, some_at_once), demand.largest_request);
  return demand;
}

Bytes bytes_for_blocks(const BlockBudget& budget) {
  if (budget.pool) {
    return *budget.pool;
  }
  Bytes bytes = budget.available - budget.device_in_host - kHostReserve;
  if (budget.host_memory) {
    bytes = std::min(bytes, *budget.host_memory - budget.weights);
  }
  return std::max(bytes, Bytes{0});
}

DeviceRoom device_room(const ModelShape& shape, DType dtype, const Demand& demand,
                       const BatchOptions& options, const DeviceMemory& memory) {
  const DeviceSizes sizes = device_sizes(shape, dtype, {});
  const auto left = [=](std::int64_t act, std::int64_t kv, std::int64_t of_host) {
    Allocation all = with_host_blocks(of_host);
    all.act_blocks = static_cast<std::uint32_t>(act);
    all.kv_blocks += static_cast<std::uint32_t>(kv);
    all.resident_layers = 0;
    const Bytes overhead = overhead_with(memory, shape, dtype, options.kv_format, all);
    const DeviceLimits limits =
        buffers_that_fit(shape, dtype, demand, all, options, overhead, memory.cap);
    // The regions of blocks that stay are rounded up, too, and each KV block among them is an entry of the
    // tables of each side.
    const std::int64_t here =
        memory.cap / (block_sizes(shape, dtype, options.kv_format).block(BlockKind::kv) *
                      shape.num_hidden_layers);
    return memory.cap - device_memory(shape, dtype, limits, overhead) -
           Bytes{kRegionAlignment} * (shape.num_hidden_layers + 1) -
           Bytes{limits.sides * kContextBlockBytes} * here;
  };
  return {.layer = sizes.layer_slab, .streaming = sizes.layer_slab * 2, .left = left};
}

AllocationInputs allocation_inputs(const ModelShape& shape, DType dtype, const Demand& demand,
                                   const BatchOptions& options, Bytes host) {
  return {.sizes = block_sizes(shape, dtype, options.kv_format),
          .layers = shape.num_hidden_layers,
          .host = host,
          .most_blocks = demand.most_blocks,
          .largest_request = demand.largest_request,
          .mini_batch = options.mini_batch_tokens / kBlockTokens,
          .requests = demand.requests,
          .sequences = demand.sequences,
          .prompt_rows = demand.most_prompt_rows,
          .prefill_rows = options.prefill_tokens,
          .most_tokens = demand.kept.window > 0 ? demand.most_tokens : 0};
}

Rehearsal rehearsal_of(const ModelShape& shape, const Demand& demand, const Allocation& blocks,
                       const DeviceLimits& device, const BatchOptions& options) {
  return {.host = blocks,
          .device = device,
          .pack = pack_limits(options, device),
          .requests = demand.requests,
          .each = demand.each,
          .sequences = demand.sequences,
          .most_blocks = demand.most_blocks,
          .most_tokens = demand.kept.window > 0 ? demand.most_tokens : 0,
          .kept = demand.kept,
          .prompt_rows = demand.most_prompt_rows,
          .prefill_rows = device.max_rows - demand.sequences,
          .prefill_rows_beside = options.prompt_rows.value_or(options.prefill_tokens),
          .windows = windows_of(shape)};
}

Allocation allocate_host(const Policy& policy, const ModelShape& shape, DType dtype,
                         const Demand& demand, const BatchOptions& options,
                         const BlockBudget& budget, const std::optional<DeviceMemory>& device,
                         const FixedPlacement& fixed) {
  AllocationInputs inputs =
      allocation_inputs(shape, dtype, demand, options, bytes_for_blocks(budget));
  inputs.layer_copy = budget.layer_copy;
  inputs.fixed = fixed;
  if (device) {
    // As choose_device_limits has them, where no blocks but these compete for the device.
    const auto all_on_host = [=, cap = device->cap, memory = *device](std::int64_t blocks) {
      const Allocation all = with_host_blocks(blocks);
      const Bytes overhead = overhead_with(memory, shape, dtype, options.kv_format, all);
      const DeviceLimits limits =
          buffers_that_fit(shape, dtype, demand, all, options, overhead, cap);
      return with_resident_layers(shape, dtype, limits, overhead, cap).resident_layers;
    };
    inputs.resident_layers = [room = device_room(shape, dtype, demand, options, *device),
                              layers = shape.num_hidden_layers, all_on_host](
                                 std::int64_t act, std::int64_t kv, std::int64_t of_host) {
      if (act + kv == 0) {
        return all_on_host(of_host);
      }
      const Bytes left = room.left(act, kv, of_host);
      return left + room.streaming >= room.layer * layers
                 ? layers
                 : static_cast<std::int32_t>(
                       std::clamp<std::int64_t>(left / room.layer, 0, layers));
    };
  }
  inputs.host_cores = device && device->attends_on_host && options.host_attention;
  if (device && device->holds_blocks) {
    inputs.device = device_room(shape, dtype, demand, options, *device);
    const auto with = [&](const Allocation& blocks) -> std::optional<Rehearsal> {
      if (blocks.all_act_blocks() + blocks.all_kv_blocks() + blocks.token_blocks <
          demand.largest_request) {
        return std::nullopt;
      }
      const Bytes overhead = overhead_with(*device, shape, dtype, options.kv_format, blocks);
      const DeviceLimits limits =
          buffers_that_fit(shape, dtype, demand, blocks, options, overhead, device->cap);
      if (device_memory(shape, dtype, limits, overhead) > device->cap) {
        return std::nullopt;
      }
      return rehearsal_of(shape, demand, blocks, limits, options);
    };
    const auto layout = std::make_shared<const WeightLayout>(weight_layout(shape, dtype));
    inputs.rehearse = each_once<Rehearsed>(
        [with, layout, &policy](const Profile& profile, const Allocation& blocks) {
          const auto rehearsal = with(blocks);
          return rehearsal ? std::optional(rehearse(profile, policy, *layout, *rehearsal))
                           : std::nullopt;
        });
    inputs.rehearse_job = each_once<Seconds>(
        [with, layout, &policy](const Profile& profile, const Allocation& blocks) {
          const auto rehearsal = with(blocks);
          return rehearsal ? rehearse_job(profile, policy, *layout, *rehearsal) : std::nullopt;
        });
  }
  Allocation host = policy.allocate(inputs);
  if (fixed.resident_layers) {
    host.resident_layers = fixed.resident_layers;
  }
  std::int64_t blocks = host.all_act_blocks() + host.all_kv_blocks();
  if (fixed.fixes_blocks() && host.gpu_act_blocks + host.gpu_kv_blocks == 0) {
    blocks += std::int64_t{*fixed.gpu_act_blocks} + *fixed.gpu_kv_blocks;
  }
  if (blocks + host.token_blocks >= demand.largest_request) {
    return host;
  }
  if (budget.pool) {
    fail_for_pool(demand, blocks + host.token_blocks);
  }
  fail(
      "host memory: the context of the largest request (line {}, {}) takes {}, and the {} left for "
      "blocks hold {} ({}, {} available, {} of weights): raise --host-memory or leave that line "
      "out",
      demand.largest.n, counted(demand.longest_context, "token"),
      counted(demand.largest_request, "block"), size_text(inputs.host), blocks,
      budget.host_memory ? "--host-memory " + size_text(*budget.host_memory)
                         : std::string("no --host-memory given"),
      size_text(budget.available), size_text(budget.weights));
}

void fail_for_pool(const Demand& demand, std::int64_t blocks) {
  fail(
      "the pool of this run has room for {} with that policy, and the largest request (line {}) "
      "takes {}: have the pool made anew (--rebuild), or start a run with it (--policy, --resume)",
      counted(blocks, "block"), demand.largest.n, demand.largest_request);
}

std::uint64_t region_bytes(const BlockSizes& sizes, const Allocation& host) {
  const Bytes blocks =
      sizes.block(BlockKind::act) * host.act_blocks + sizes.block(BlockKind::kv) * host.kv_blocks;
  return static_cast<std::uint64_t>(round_up(blocks.n, kRegionAlignment));
}

DeviceLimits choose_device_limits(const ModelShape& shape, DType dtype, const Demand& demand,
                                  const Allocation& host, const BatchOptions& options,
                                  Bytes overhead, Bytes cap) {
  const DeviceLimits limits = buffers_that_fit(shape, dtype, demand, host, options, overhead, cap);
  if (!host.resident_layers) {
    return with_resident_layers(shape, dtype, limits, overhead, cap);
  }
  const Bytes wanted = device_memory(shape, dtype, limits, overhead);
  if (wanted > cap && limits.resident_layers + limits.gpu_act_blocks + limits.gpu_kv_blocks > 0) {
    fail(
        "device memory: beside the smallest buffers, {} of weights and {} of context on the device "
        "take {}, {} are allowed: raise --gpu-memory or have less there (--resident-layers, "
        "--percent)",
        counted(limits.resident_layers, "layer"),
        counted(limits.gpu_act_blocks + limits.gpu_kv_blocks, "block"), size_text(wanted),
        size_text(cap));
  }
  check_fits(plan_device_memory(shape, dtype, limits, overhead), cap);
  return limits;
}

Placement place_blocks(const ModelShape& shape, DType dtype, const Demand& demand,
                       const Allocation& host, const BatchOptions& options, Bytes overhead,
                       Bytes cap, const FixedPlacement& wished) {
  if (host.placed) {
    const Allocation blocks = with_fixed(host, wished);
    return {.host = blocks,
            .device = choose_device_limits(shape, dtype, demand, blocks, options, overhead, cap)};
  }
  const std::int64_t all = std::int64_t{host.act_blocks} + host.kv_blocks;
  const std::int64_t most = host.token_blocks > 0 ? all : demand.most_blocks;
  // Of a budget too small for a block there is no share.
  const auto wanted = [&](std::uint32_t blocks) {
    return all > 0 ? ceil_div(blocks * most, all) : 0;
  };
  const std::int64_t act = wanted(host.act_blocks), kv = wanted(host.kv_blocks);
  const FixedPlacement fixed = wished.for_blocks(act, kv);
  // The buffers must hold what a request may have of them, wherever it lies.
  Allocation everywhere = host;
  everywhere.act_blocks = static_cast<std::uint32_t>(std::max<std::int64_t>(host.act_blocks, act));
  everywhere.kv_blocks = static_cast<std::uint32_t>(std::max<std::int64_t>(host.kv_blocks, kv));
  if (fixed.fixes_blocks()) {
    everywhere.placed = true;
    everywhere.gpu_act_blocks = *fixed.gpu_act_blocks;
    everywhere.gpu_kv_blocks = *fixed.gpu_kv_blocks;
  }
  // With buffers for `buffered`; the pool may be left without a block.
  const auto place = [&](const Allocation& buffered) {
    Placement placement{
        .host = host,
        .device = choose_device_limits(shape, dtype, demand, buffered, options, overhead, cap)};
    if (!fixed.fixes_blocks()) {
      const std::int64_t kv_here = fixed.gpu_act_alone ? 0 : kv;
      for (const auto& [kind, blocks] :
           {std::pair{BlockKind::act, act}, {BlockKind::kv, kv_here}}) {
        placement.device =
            with_gpu_blocks(shape, dtype, placement.device, overhead, cap, kind, blocks);
      }
    }
    Allocation& placed = placement.host;
    placed.gpu_act_blocks = static_cast<std::uint32_t>(placement.device.gpu_act_blocks);
    placed.gpu_kv_blocks = static_cast<std::uint32_t>(placement.device.gpu_kv_blocks);
    const auto left = [](std::uint32_t blocks, std::int64_t most_of_kind, std::uint32_t here) {
      return static_cast<std::uint32_t>(
          std::min<std::int64_t>(blocks, std::max<std::int64_t>(most_of_kind - here, 0)));
    };
    placed.act_blocks = left(host.act_blocks, act, placed.gpu_act_blocks);
    placed.kv_blocks = left(host.kv_blocks, kv, placed.gpu_kv_blocks);
    // Blocks of a kind on the device beyond the policy's wish replace blocks of the other kind.
    const std::int64_t more = placed.all_act_blocks() + placed.all_kv_blocks() - most;
    if (fixed.fixes_blocks() && more > 0) {
      std::uint32_t& other =
          placed.act_blocks > placed.kv_blocks ? placed.act_blocks : placed.kv_blocks;
      other -= static_cast<std::uint32_t>(std::min<std::int64_t>(more, other));
    }
    return placement;
  };
  Placement placement = place(everywhere);
  if (placement.host.act_blocks + placement.host.kv_blocks > 0) {
    return placement;
  }
  // A pool has a block. It is one more of its kind, so a request may have one more of that kind.
  const bool is_act = host.act_blocks > 0;
  const auto of_kind = [&](Allocation& blocks) -> std::uint32_t& {
    return is_act ? blocks.act_blocks : blocks.kv_blocks;
  };
  const std::int64_t there = is_act ? placement.host.gpu_act_blocks : placement.host.gpu_kv_blocks;
  const std::int32_t slots = is_act ? placement.device.act_slots : placement.device.kv_slots;
  if (slots < std::min<std::int64_t>(there + 1, demand.largest_request)) {
    ++of_kind(everywhere);
    placement = place(everywhere);
  }
  if (placement.host.act_blocks + placement.host.kv_blocks == 0) {
    of_kind(placement.host) = 1;
  }
  return placement;
}

BatchOptions with_mini_batch(BatchOptions options, const Profile* profile) {
  constexpr double kNear = 0.75;   // of the size it would have otherwise, or the other way round
  constexpr double kGains = 0.98;  // or it is not worth being another
  if (!options.by_profile || profile == nullptr) {
    return options;
  }
  const double usual = static_cast<double>(options.mini_batch_tokens) / kBlockTokens;
  options.by_profile = false;  // decided: a second call must not change the size again
  const Line kv_gen = profile->gen_of_answers(0);
  double least = kGains * kv_gen(usual).n / usual;
  for (const Point& point : kv_gen.points) {
    const bool near = point.n >= kNear * usual && kNear * point.n <= usual;
    if (near && point.n == std::floor(point.n) && point.time.n / point.n < least) {
      least = point.time.n / point.n;
      options.mini_batch_tokens = static_cast<std::int32_t>(point.n) * kBlockTokens;
    }
  }
  return options;
}

BatchOptions with_largest_mini_batch(BatchOptions options, const ModelShape& shape, DType dtype,
                                     std::span<const RequestSize> requests, const KeptContext& kept,
                                     const DeviceMemory& memory, std::int32_t resident) {
  constexpr std::int64_t kMaxTokens = 1 << 24;  // as many as an option may say
  const auto demand = [&](std::int32_t sequences) {
    return demand_of(requests, sequences, kept, options.prefill_tokens);
  };
  const Demand all = demand(options.max_num_seqs);
  // Buffers are also for the rows of all that are under way, however few mini-batches these are.
  const auto fits = [&](std::int32_t sequences) {
    const std::int64_t blocks = demand(sequences).most_blocks;
    if (blocks * kBlockTokens > kMaxTokens) {
      return false;
    }
    BatchOptions larger = options;
    larger.mini_batch_tokens = static_cast<std::int32_t>(blocks * kBlockTokens);
    const Allocation context{.kv_blocks = static_cast<std::uint32_t>(blocks)};
    DeviceLimits limits = limits_after(0, all, context, larger);
    limits.resident_layers = resident;
    const Bytes overhead = overhead_with(memory, shape, dtype, options.kv_format, context);
    return device_memory(shape, dtype, limits, overhead) <= memory.cap;
  };
  std::int32_t least = 1;  // the largest request alone, however small the rest is made
  for (std::int32_t beyond = all.sequences + 1; beyond - least > 1;) {
    const std::int32_t middle = least + (beyond - least) / 2;
    (fits(middle) ? least : beyond) = middle;
  }
  options.mini_batch_tokens =
      static_cast<std::int32_t>(std::min(kMaxTokens, demand(least).most_blocks * kBlockTokens));
  options.by_profile = false;
  return options;
}

ScheduleLimits schedule_limits(const BatchOptions& options, const Demand& demand,
                               const Allocation& host, const DeviceLimits& device) {
  return {.max_num_seqs = demand.sequences,
          .prefill_rows = device.max_rows - demand.sequences * (1 + recompute_rows(host)),
          .prompt_rows = options.prompt_rows.value_or(options.prefill_tokens),
          .sequence_rows = device.max_mini_batch_rows,
          .kept = demand.kept};
}

PackLimits pack_limits(const BatchOptions& options, const DeviceLimits& device) {
  const auto slots = static_cast<std::int64_t>(device.act_slots) + device.kv_slots;
  return {.act_slots = device.act_slots,
          .kv_slots = device.kv_slots,
          .tokens = static_cast<std::int32_t>(
              std::min<std::int64_t>(options.mini_batch_tokens, slots * kBlockTokens)),
          .rows = device.max_mini_batch_rows,
          .sequences = device.max_sequences};
}

}  // namespace poise

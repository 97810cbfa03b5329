#include "planner/record/inspect.h"

#include <fmt/core.h>

#include <set>

#include "common/files/regular_file.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/record/inspect_brief.h"
#include "planner/record/log_extent.h"

namespace poise {
namespace {

double mib(std::uint64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(kMiB.n); }

// What an iteration works on, in one line.
std::string headline(const LoggedIteration& iteration) {
  std::uint64_t sequences = 0, rows = 0, prompts = 0, context = 0, runs = 0;
  std::uint64_t blocks[2] = {0, 0};  // KV, ACT
  std::uint64_t in_place = 0;        // KV, that host cores attend
  std::uint64_t absorbed = 0;        // ACT, that rows attend as they are
  for (const auto& batch : iteration.tables.mini_batches) {
    sequences += batch->sequences.size();
    rows += batch->tokens.size();
    runs += batch->loads.size();
    for (const messages::Sequence& sequence : batch->sequences) {
      context += sequence.context();
      prompts += sequence.new_tokens() > 1 ? sequence.new_tokens() : 0;
    }
    for (const messages::AttentionEntry& entry : batch->entries) {
      in_place += entry.where() == messages::Where::HostInPlace ? 1 : 0;
      absorbed += entry.where() == messages::Where::Activation ? 1 : 0;
    }
    for (const messages::BlockRun& run : batch->loads) {
      blocks[run.kind() == messages::Kind::Kv ? 0 : 1] += run.count();
    }
  }
  return fmt::format(
      "iteration {} at {:.3f} s{}: {}, {}, {} ({} of prompts), {} of context; {} KV and {} to load "
      "in {}{}{}\n",
      iteration.tables.iteration, iteration.sent,
      iteration.done ? fmt::format(", {:.2f} ms", (*iteration.done - iteration.sent) * 1e3)
                     : std::string(", not finished"),
      counted(iteration.tables.mini_batches.size(), "mini-batch"), counted(sequences, "sequence"),
      counted(rows, "row"), prompts, counted(context, "token"), blocks[0],
      counted(blocks[1], "ACT block"), counted(runs, "run"),
      in_place > 0 ? fmt::format(", {} that host cores attend", counted(in_place, "KV block")) : "",
      absorbed > 0 ? fmt::format(", {} attended as they are", counted(absorbed, "ACT block")) : "");
}

std::string layer_text(const LoggedLayer& layer, const LogFacts& facts) {
  std::string line = fmt::format("  {:<10}{:>10.3f}{:>12.3f}{:>10.3f}{:>10.3f}{:>11.3f}",
                                 stage_name(layer.order.stage, facts.layers), layer.sent,
                                 mib(layer.ordered.weights), mib(layer.ordered.kv),
                                 mib(layer.ordered.act), mib(layer.ordered.stores));
  if (!layer.done) {
    return line + "  not done\n";
  }
  const BalanceSums sums = balance_of(layer.report, facts.sizes);
  line += fmt::format("{:>10.3f}", *layer.done);
  for (const Seconds time : {sums.pcie, sums.compute, sums.back, sums.for_weights, sums.for_blocks,
                             sums.for_rows, sums.for_buffers}) {
    line += fmt::format("{:>10.3f}", time.n * 1e3);
  }
  return line + (sums.f_b_mini_batches > 0 ? fmt::format("{:>8.2f}\n", sums.mean_f_b()) : "\n");
}

std::string balance_text(const BalanceSums& sums) {
  return fmt::format(
      "  T_PCIe {:.3f} ms, T_compute {:.3f} ms, F_b {:.2f}; computation waited {:.3f} ms for "
      "weights, {:.3f} for blocks, {:.3f} for rows, the link {:.3f} for buffers{}\n",
      sums.pcie.n * 1e3, sums.compute.n * 1e3, sums.mean_f_b(), sums.for_weights.n * 1e3,
      sums.for_blocks.n * 1e3, sums.for_rows.n * 1e3, sums.for_buffers.n * 1e3,
      sums.host.n > 0
          ? fmt::format("; T_host {:.3f} ms for {:.3f} MiB, for which computation waited {:.3f} ms",
                        sums.host.n * 1e3, mib(sums.host_read), sums.for_host.n * 1e3)
          : "");
}

void count(const LoggedIteration& iteration, Balance& balance, std::int64_t& without_reports) {
  if (!iteration.done) {
    return;
  }
  if (!has_reports(iteration)) {
    ++without_reports;
    balance.pause();
    return;
  }
  balance.begin(kind_of(iteration.tables), {iteration.sent});
  for (const LoggedLayer& layer : iteration.layers) {
    if (layer.done) {
      balance.take(layer.report);
    }
  }
  balance.end({*iteration.done});
}

std::string policy_text(const messages::PolicyInForceT& policy, double time) {
  return fmt::format(
      "policy {} at {:.3f} s, from iteration {} on: {} ACT and {} wished on the host\n",
      shown(policy.policy), time, policy.iteration, policy.act_blocks,
      counted(policy.kv_blocks, "KV block"));
}

std::string configure_text(const messages::ConfigureT& configure, double time) {
  return fmt::format(
      "configured at {:.3f} s: {} resident, {} ({} in a mini-batch), {} ACT and {}\n", time,
      counted(configure.resident_layers, "layer"), counted(configure.max_rows, "row"),
      configure.max_mini_batch_rows, configure.act_slots, counted(configure.kv_slots, "KV slot"));
}

std::string ready_text(const messages::ReadyT& ready, double time) {
  return fmt::format("ready at {:.3f} s: {} on the device, {} of host memory\n", time,
                     size_text({static_cast<std::int64_t>(ready.device_bytes)}),
                     size_text({static_cast<std::int64_t>(ready.host_bytes)}));
}

// What stands before the iterations.
std::string begin_text(const InspectOptions& options, const LogDigest& log) {
  if (options.json) {
    return nlohmann::ordered_json::parse(log.facts().header).dump() + "\n";  // on one line
  }
  const std::string missing = missing_text(log.extent());
  const std::string& header = log.facts().header;
  return fmt::format("{}: {}\n", shown(options.log.string(), 300),
                     shown(header, header.size() + 1)) +
         (missing.empty() ? "" : missing + "\n");
}

// … and behind them.
std::string end_text(const LogDigest& log, std::uint64_t iterations, const Balance& balance,
                     const BalanceFacts& told) {
  return fmt::format(
      "{}, {}{}\n{}\n", counted(iterations, "iteration"), counted(log.records(), "record"),
      log.torn_tail().n > 0 ? fmt::format("; torn off at the end: {}", size_text(log.torn_tail()))
                            : std::string(),
      words(balance, told));
}

bool is_asked_for(const LoggedLayer& one, std::optional<std::uint32_t> layer) {
  return !layer || one.order.stage == *layer + 1;
}

}  // namespace

bool has_reports(const LoggedIteration& iteration) { return iteration.keeps == LogKeeps::full; }

BalanceSums sums_of(const LoggedIteration& iteration, const LogFacts& facts) {
  BalanceSums sums;
  for (const LoggedLayer& layer : iteration.layers) {
    if (layer.done) {
      sums.add(balance_of(layer.report, facts.sizes));
    }
  }
  return sums;
}

std::string iteration_text(const LoggedIteration& iteration, const LogFacts& facts,
                           std::optional<std::uint32_t> layer) {
  std::string text = headline(iteration);
  if (!has_reports(iteration)) {
    return text + "  no orders of its layers and no reports on them (--orders-log tables)\n";
  }
  text +=
      "  stage        sent s weights MiB    KV MiB   ACT MiB stores MiB    done s T_PCIe ms T_comp "
      "ms "
      "   out ms w weights  w blocks    w rows w buffers     F_b\n";
  for (const LoggedLayer& one : iteration.layers) {
    if (is_asked_for(one, layer)) {
      text += layer_text(one, facts);
    }
  }
  return text + balance_text(sums_of(iteration, facts));
}

void inspect(const InspectOptions& options, std::FILE* out) {
  LogDigest log(options.log);
  const LogFacts& facts = log.facts();
  if (options.layer && *options.layer >= static_cast<std::uint32_t>(facts.layers)) {
    fail("--layer {}: the model has layers 0 to {}", *options.layer, facts.layers - 1);
  }
  fmt::print(out, "{}", begin_text(options, log));
  std::uint64_t iterations = 0, shown = 0;
  Balance balance(facts.sizes);
  RequestTimes requests;
  BalanceFacts told{.device = "device",
                    .act_is_smaller = facts.sizes.act_row < facts.sizes.kv_row};
  log.read(
      {.iteration =
           [&](const LoggedIteration& iteration) {
             ++iterations;
             count(iteration, balance, told.without_reports);
             if (options.iteration && iteration.tables.iteration != *options.iteration) {
               return;
             }
             ++shown;
             if (options.brief) {
               requests.take(iteration);
             }
             fmt::print(out, "{}",
                        options.brief  ? brief_json(iteration, facts)
                        : options.json ? iteration_json(iteration, facts, options.layer)
                                       : iteration_text(iteration, facts, options.layer));
           },
       .configure =
           [&](const messages::ConfigureT& configure, double time) {
             balance.pause();
             fmt::print(out, "{}",
                        options.json ? configure_json(configure, time)
                                     : configure_text(configure, time));
           },
       .ready =
           [&](const messages::ReadyT& ready, double time) {
             fmt::print(out, "{}",
                        options.json ? ready_json(ready, time) : ready_text(ready, time));
           },
       .policy =
           [&](const messages::PolicyInForceT& policy, double time) {
             fmt::print(out, "{}",
                        options.json ? policy_json(policy, time) : policy_text(policy, time));
           },
       .pool = {},
       .weights = {},
       .successor =
           [&](Successor successor, double time) {
             if (options.brief) {
               fmt::print(out, "{}", successor_json(successor, time));
             }
           }});
  if (options.iteration && shown == 0) {
    fail("--iteration {}: not in this log of {}", *options.iteration,
         counted(iterations, "iteration"));
  }
  fmt::print(out, "{}",
             options.json ? requests.json() + balance_json(balance, told)
                          : end_text(log, iterations, balance, told));
}

}  // namespace poise

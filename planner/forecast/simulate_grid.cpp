#include "planner/forecast/simulate_grid.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/trouble.h"
#include "planner/costs/machine_file.h"
#include "planner/forecast/simulate.h"
#include "planner/forecast/simulate_papers.h"

namespace poise {
namespace {

struct GridModel {
  std::string name;
  ModelShape shape;
};

struct GridWork {
  std::int32_t requests, prompt, answer;
};

struct GridMemory {
  std::string machine;
  std::int64_t gpu, host;  // GiB; 0: all that the machine has
};

std::vector<GridModel> grid_models() {
  return {{"opt-6.7b", opt_shape("opt-6.7b")},
          {"opt-13b", opt_shape("opt-13b")},
          {"opt-30b", opt_shape("opt-30b")},
          {"opt-6.7b, 8 of 32 keys", with_shared_keys(opt_shape("opt-6.7b"), 8)},
          {"opt-6.7b, 16 of 32 keys", with_shared_keys(opt_shape("opt-6.7b"), 16)},
          {"opt-30b, 8 of 56 keys", with_shared_keys(opt_shape("opt-30b"), 8)}};
}

constexpr std::array<GridWork, 4> kWorks{
    {{128, 1920, 128}, {128, 512, 128}, {32, 1024, 64}, {250, 256, 64}}};

std::vector<GridMemory> grid_memories(const std::optional<std::string>& machine) {
  if (machine) {
    return {{*machine, 0, 0}};
  }
  return {{"rtx4090-pcie4", 0, 200},
          {"rtx4090-pcie4", 0, 90},
          {"l4-pcie4", 0, 0},
          {"h200-pcie5", 24, 110},
          {"h200-pcie5", 60, 0}};
}

nlohmann::ordered_json grid_row(const GridModel& model, const GridMemory& memory,
                                const GridWork& work) {
  const SimulatedWork simulated{.shape = model.shape,
                                .requests = work.requests,
                                .prompt = work.prompt,
                                .answer = work.answer,
                                // As many under way under every policy.
                                .batch = {.min_num_seqs = BatchOptions{}.max_num_seqs},
                                .to_the_end = true};
  Profile profile = costs_on(memory.machine, simulated.shape, simulated.dtype);
  profile.gpu_memory = memory.gpu > 0 ? kGiB * memory.gpu : profile.gpu_memory;
  profile.host_memory = memory.host > 0 ? kGiB * memory.host : profile.host_memory;
  const auto shared = std::make_shared<const Profile>(profile);
  nlohmann::ordered_json row{{"model", model.name},
                             {"machine", memory.machine},
                             {"gpu_gib", profile.gpu_memory.n / kGiB.n},
                             {"host_gib", profile.host_memory.n / kGiB.n},
                             {"requests", work.requests},
                             {"prompt", work.prompt},
                             {"answer", work.answer}};
  double best = 0, optimal = 0;
  for (const PolicyEntry& policy : policies()) {
    const std::string name(policy.name);
    try {
      const SimulatedRun run = simulate(profile, policy.name, {.profile = shared}, simulated);
      const double speed = run.whole_tokens_per_second;
      row[name] = speed;
      if (name == "optimal") {
        const std::int64_t most =
            std::int64_t{std::min(work.requests, simulated.batch.max_num_seqs)} *
            ceil_div(work.prompt + work.answer - 1, kBlockTokens);
        row["room_for_all"] = run.host.all_act_blocks() + run.host.all_kv_blocks() >= most;
      }
      (name == "optimal" ? optimal : best) = std::max(name == "optimal" ? optimal : best, speed);
    } catch (const Failure&) {
      row[name] = nullptr;
    }
  }
  row["best"] = best;
  row["optimal_to_best"] = best > 0 ? optimal / best : 1;
  // Without a bound, it chooses how many are under way.
  SimulatedWork any = simulated;
  any.batch.min_num_seqs = BatchOptions{}.min_num_seqs;
  const SimulatedRun run = simulate(profile, "optimal", {.profile = shared}, any);
  row["at_a_time"] = run.device.max_sequences;
  row["optimal_so"] = run.whole_tokens_per_second;
  return row;
}

// Of the rows in which optimal has fewer requests under way than there are.
std::string words_of_fewer(const nlohmann::ordered_json& rows) {
  std::vector<double> gains;
  for (const auto& row : rows) {
    const auto all = std::min(row["requests"].get<std::int32_t>(), BatchOptions{}.max_num_seqs);
    if (row["at_a_time"].get<std::int32_t>() < all) {
      gains.push_back(row["optimal_so"].get<double>() / row["optimal"].get<double>());
    }
  }
  if (gains.empty()) {
    return "in no row has optimal fewer requests at a time";
  }
  std::ranges::sort(gains);
  const double median = (gains[(gains.size() - 1) / 2] + gains[gains.size() / 2]) / 2;
  return fmt::format(
      "in {} of them it has fewer requests at a time: {:.1f} times the tokens/s (median), "
      "{:.2f} to {:.1f}",
      gains.size(), median, gains.front(), gains.back());
}

// Host cores of these GB/s beside the machine; on works of which some are limited by the link, some by host memory.
constexpr std::array<double, 3> kGridHosts{0, 50, 150};
constexpr std::array<GridWork, 2> kHostWorks{{{128, 1024, 32}, {64, 512, 64}}};

nlohmann::ordered_json host_grid_row(const GridModel& model, const GridMemory& memory,
                                     const GridWork& work, double host) {
  const SimulatedWork simulated{.shape = model.shape,
                                .requests = work.requests,
                                .prompt = work.prompt,
                                .answer = work.answer,
                                .batch = {.min_num_seqs = BatchOptions{}.max_num_seqs},
                                .to_the_end = true};
  Machine machine = find_machine(memory.machine).machine;
  machine.host = host;
  Profile profile = profile_of(machine, simulated.shape, simulated.dtype);
  profile.gpu_memory = memory.gpu > 0 ? kGiB * memory.gpu : profile.gpu_memory;
  profile.host_memory = memory.host > 0 ? kGiB * memory.host : profile.host_memory;
  const auto shared = std::make_shared<const Profile>(profile);
  nlohmann::ordered_json row{{"model", model.name},       {"machine", memory.machine},
                             {"requests", work.requests}, {"prompt", work.prompt},
                             {"answer", work.answer},     {"host_gbps", host}};
  double best = 0, optimal = 0;
  for (const PolicyEntry& policy : policies()) {
    try {
      const SimulatedRun run = simulate(profile, policy.name, {.profile = shared}, simulated);
      const double speed = run.whole_tokens_per_second;
      row[std::string(policy.name)] = speed;
      if (policy.name == "optimal") {
        optimal = speed;
        row["on_host"] = run.host.host_share;
      } else {
        best = std::max(best, speed);
      }
    } catch (const Failure&) {  // no room, or no host cores
      row[std::string(policy.name)] = nullptr;
    }
  }
  row["best"] = best;
  row["optimal_to_best"] = best > 0 ? optimal / best : 1;
  return row;
}

}  // namespace

nlohmann::ordered_json host_grid(const std::optional<std::string>& machine) {
  nlohmann::ordered_json json{{"rows", nlohmann::ordered_json::array()}};
  const std::vector<GridMemory> memories =
      machine ? std::vector<GridMemory>{{*machine, 0, 0}}
              : std::vector<GridMemory>{{"rtx4090-pcie4", 0, 200}, {"h200-pcie5", 24, 110}};
  double least = std::numeric_limits<double>::infinity();
  for (const GridModel& model : grid_models()) {
    if (model.name != "opt-6.7b" && model.name != "opt-30b") {
      continue;
    }
    for (const GridMemory& memory : memories) {
      for (const GridWork& work : kHostWorks) {
        for (const double host : kGridHosts) {
          json["rows"].push_back(host_grid_row(model, memory, work, host));
          least = std::min(least, json["rows"].back()["optimal_to_best"].get<double>());
        }
      }
    }
  }
  json["notes"].push_back(
      fmt::format("{} rows; optimal has at least {:.3f} of the best other policy's tokens/s, with "
                  "host cores of 0, 50 and 150 GB/s",
                  json["rows"].size(), least));
  return json;
}

nlohmann::ordered_json policy_grid(const std::optional<std::string>& machine) {
  nlohmann::ordered_json json{{"rows", nlohmann::ordered_json::array()}};
  for (const GridModel& model : grid_models()) {
    for (const GridMemory& memory : grid_memories(machine)) {
      for (const GridWork& work : kWorks) {
        json["rows"].push_back(grid_row(model, memory, work));
      }
    }
  }
  double least = std::numeric_limits<double>::infinity();
  for (const auto& one : json["rows"]) {
    least = std::min(least, one["optimal_to_best"].get<double>());
  }
  json["notes"].push_back(
      fmt::format("{} rows; optimal has at least {:.3f} of the best other policy's tokens/s",
                  json["rows"].size(), least));
  json["notes"].push_back(words_of_fewer(json["rows"]));
  return json;
}

}  // namespace poise

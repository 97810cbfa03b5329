// Whole runs, from the first prompt to the last answer: how long link and GPU work of it, and in which
// iterations neither does.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>

#include "planner/costs/machine_file.h"
#include "planner/forecast/simulate.h"
#include "planner/forecast/simulate_papers.h"

namespace poise {
namespace {

struct WholeRun {
  const char* model;
  const char* policy;
  std::int32_t requests, at_a_time, prompt, answer;
};

constexpr std::array<WholeRun, 14> kWholeRuns{{
    {"opt-6.7b", "act-only", 512, 128, 1024, 32},
    {"opt-6.7b", "act-only", 512, 256, 1024, 32},
    {"opt-6.7b", "act-only", 128, 128, 1024, 32},
    {"opt-6.7b", "kv-only", 512, 128, 1024, 32},
    {"opt-6.7b", "hybrid", 512, 128, 1024, 32},
    {"opt-6.7b", "optimal", 512, 128, 1024, 32},
    {"opt-6.7b, 8 of 32 keys", "optimal", 512, 112, 1024, 32},
    {"opt-13b", "act-only", 128, 128, 512, 32},
    {"opt-13b", "act-only", 512, 128, 512, 128},
    {"opt-13b", "kv-only", 512, 128, 512, 32},
    {"opt-13b", "optimal", 512, 128, 512, 32},
    {"opt-30b", "optimal", 192, 192, 512, 32},
    {"opt-30b", "optimal", 768, 192, 512, 32},
    {"opt-30b", "kv-only", 768, 100, 512, 32},
}};
constexpr std::int64_t kWholeGpuGib = 24, kWholeHostGib = 110;

ModelShape shape_named(std::string_view name) {
  const auto comma = name.find(',');
  return comma == std::string_view::npos ? opt_shape(name)
                                         : with_shared_keys(opt_shape(name.substr(0, comma)), 8);
}

std::string words_of(const SimulatedPhase& phase) {
  return fmt::format("{}: {:.2f} ({:.2f}, {:.2f})", phase.iterations, phase.time.n, phase.link.n,
                     phase.compute.n);
}

nlohmann::ordered_json row_of(const WholeRun& one, const std::string& machine) {
  const SimulatedWork work{
      .shape = shape_named(one.model),
      .requests = one.requests,
      .prompt = one.prompt,
      .answer = one.answer,
      .batch = {.max_num_seqs = one.at_a_time, .min_num_seqs = one.at_a_time},
      .overlapped = true,
      .to_the_end = true};
  Profile profile = costs_on(machine, work.shape, work.dtype);
  profile.gpu_memory = kGiB * kWholeGpuGib;
  profile.host_memory = kGiB * kWholeHostGib;
  const auto shared = std::make_shared<const Profile>(profile);
  const SimulatedRun run = simulate(*shared, one.policy, {.profile = shared}, work);
  SimulatedWork together = work;
  together.overlapped = false;
  const SimulatedRun at_once = simulate(*shared, one.policy, {.profile = shared}, together);
  const SimulatedPhase whole = run.prompts + run.both + run.answers;
  return {{"model", one.model},
          {"policy", one.policy},
          {"work", fmt::format("{} x ({} + {}), {} at a time", one.requests, one.prompt,
                               one.answer, one.at_a_time)},
          {"rows", run.prompt_rows},
          {"sides", run.device.sides},
          {"all_at_once", at_once.whole_tokens_per_second},
          {"tokens_per_second", run.whole_tokens_per_second},
          {"seconds", whole.time.n},
          {"link", whole.link.n},
          {"gpu", whole.compute.n},
          {"of_longer", std::max(whole.link, whole.compute) / whole.time},
          {"prompts", words_of(run.prompts)},
          {"both", words_of(run.both)},
          {"answers", words_of(run.answers)}};
}

}  // namespace

nlohmann::ordered_json whole_runs(const SimulatedOn& on) {
  const std::string machine = on.value_or("h200-pcie5");
  nlohmann::ordered_json json{{"rows", nlohmann::ordered_json::array()}};
  for (const WholeRun& one : kWholeRuns) {
    json["rows"].push_back(row_of(one, machine));
  }
  json["notes"] = {
      fmt::format("{}, {} GiB of GPU and {} GiB of host memory; seconds of the whole run, of them link "
                  "and GPU busy, and what the longer of both is of the run",
                  machine, kWholeGpuGib, kWholeHostGib),
      "rows of prompts in an iteration beside answers, and sides for loads; all_at_once: tokens/s "
      "with as many rows as fit and two sides",
      "iterations with prompts alone, with both, with answers alone: number, seconds (link, GPU busy)"};
  return json;
}

}  // namespace poise

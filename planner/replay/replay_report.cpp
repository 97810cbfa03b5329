#include "planner/replay/replay_report.h"

#include <algorithm>

#include "common/files/json.h"
#include "common/files/replace_file.h"

namespace poise {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const StageTime& time) {
  return {{"copy_in_s", time.copy_in.n}, {"compute_s", time.compute.n},
          {"waits_s", time.waits.n},     {"copy_out_s", time.copy_out.n},
          {"host_s", time.host.n},       {"bytes_in", time.bytes_in},
          {"bytes_out", time.bytes_out}};
}

Json json_of(const AnswersCompared::Count& count) {
  return {{"compared", count.all}, {"differ", count.differ}};
}

std::uint64_t differences(const AnswersCompared& compared) {
  return compared.tokens().differ + compared.logprobs().differ + compared.shapes_differ();
}

}  // namespace

void ReplayReport::begin(std::int32_t layers) {
  const std::size_t stages = static_cast<std::size_t>(layers) + 2;
  times_.emplace_back(stages);
  recorded_.emplace(stages);
  compared_.emplace_back();
  skipped_ = rows_ = samples_ = 0;
}

void ReplayReport::take(const LoggedIteration& recorded, const messages::IterationDoneT& replayed,
                        Seconds wall) {
  for (const LoggedLayer& layer : recorded.layers) {
    recorded_->add(layer.report);
  }
  recorded_->add_iteration({*recorded.done - recorded.sent});
  times_.back().add_iteration(wall);
  for (const auto& batch : recorded.tables.mini_batches) {
    rows_ += batch->tokens.size();
    samples_ += batch->samples.size();
  }
  compared_.back().take(recorded.tables.iteration, recorded.answers, replayed);
}

void ReplayReport::write(const std::filesystem::path& output, const std::filesystem::path& orders,
                         const std::string& device, std::uint64_t link_bytes_per_s, Bytes torn,
                         const std::string& missing) const {
  const auto& worst = *std::ranges::max_element(
      compared_, {}, [](const AnswersCompared& one) { return differences(one); });
  const auto& fastest =
      *std::ranges::min_element(times_, {}, [](const StageTimes& one) { return one.wall(); });
  Json report{{"orders", orders.string()},
              {"device", device},
              {"link_bytes_per_s", link_bytes_per_s},
              {"iterations", worst.iterations()},
              {"rows", rows_},
              {"samples", samples_},
              {"unfinished_iterations", skipped_},
              {"torn_bytes", torn.n},
              {"missing", missing},
              {"tokens", json_of(worst.tokens())},
              {"logprobs", json_of(worst.logprobs())},
              {"shapes_differ", worst.shapes_differ()},
              {"equal", differences(worst) == 0},
              {"first_difference", nullptr}};
  if (const auto& first = worst.first()) {
    report["first_difference"] = {{"iteration", first->iteration},
                                  {"request", first->request},
                                  {"what", first->what},
                                  {"recorded", first->recorded},
                                  {"replayed", first->replayed}};
  }
  report["recorded_s"] = recorded_->wall().n;
  report["replayed_s"] = Json::array();
  for (const StageTimes& times : times_) {
    report["replayed_s"].push_back(times.wall().n);
  }
  report["stages"] = Json::array();
  for (std::size_t stage = 0; stage < recorded_->stages().size(); ++stage) {
    report["stages"].push_back(
        {{"stage", stage},
         {"name", stage_name(static_cast<std::uint32_t>(stage),
                             static_cast<std::int32_t>(recorded_->stages().size()) - 2)},
         {"recorded", json_of(recorded_->stages()[stage])},
         {"replayed", json_of(fastest.stages()[stage])}});
  }
  replace_file(output, report.dump(2) + '\n', {.durable = false});
}

}  // namespace poise

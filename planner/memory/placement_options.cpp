#include "planner/memory/placement_options.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "common/trouble.h"
#include "common/words.h"

namespace poise {
namespace {

constexpr double kWhole = 100;  // per cent

[[noreturn]] void refuse_percent(const std::string& text, const std::string& why) {
  fail("--percent {}: {}", text, why);
}

}  // namespace

FlexGenPercent parse_percent(const std::string& text) {
  FlexGenPercent percent{};
  std::istringstream words(text);
  std::string word;
  std::size_t count = 0;
  bool good = !text.empty() && text.back() != ',';
  for (; std::getline(words, word, ','); ++count) {
    char* end = nullptr;
    const double value = std::strtod(word.c_str(), &end);
    good = good && count < percent.size() && !word.empty() && word.front() != ' ' &&
           end == word.c_str() + word.size() && value >= 0 && value <= kWhole;
    if (good) {
      percent[count] = value;
    }
  }
  if (!good || count != percent.size()) {
    refuse_percent(text,
                   "six numbers from 0 to 100 are wanted, as in 20,80,0,100,100,0: weights on the "
                   "device and on the host, context likewise, activations likewise");
  }
  constexpr std::array<const char*, 3> kOf{"weights", "context", "activations"};
  for (std::size_t i = 0; i < kOf.size(); ++i) {
    if (percent[2 * i] + percent[2 * i + 1] != kWhole) {
      refuse_percent(text, fmt::format("{} and {} of the {} are not 100 together, and no disk is "
                                       "used: give the host what the device does not have",
                                       percent[2 * i], percent[2 * i + 1], kOf[i]));
    }
  }
  if (percent[4] != kWhole) {
    refuse_percent(text,
                   "activations between layers always stay on the device: end it with 100,0 (where "
                   "they do not fit, batches are made smaller)");
  }
  return percent;
}

GpuBlocks parse_gpu_blocks(const std::string& text) {
  if (text != "all" && text != "act" && text != "none") {
    fail("--gpu-blocks {}: one of all, act and none is wanted", text);
  }
  return text == "all" ? GpuBlocks::all : text == "act" ? GpuBlocks::act : GpuBlocks::none;
}

void PlacementOptions::check_alone() const {
  if (percent && resident_layers) {
    fail(
        "--percent and --resident-layers: only one of them can say which weights the device keeps");
  }
  if (percent && gpu_blocks) {
    fail("--percent and --gpu-blocks: only one of them can say which context the device keeps");
  }
}

void PlacementOptions::add_to(FixedPlacement& fixed, std::int32_t layers, bool holds_blocks) const {
  if (resident_layers && *resident_layers > layers) {
    fail("--resident-layers {}: the model has {}; give that many or fewer", *resident_layers,
         counted(layers, "layer"));
  }
  const bool wants_context = percent ? (*percent)[2] > 0 : gpu_blocks == GpuBlocks::act;
  if (wants_context && !holds_blocks) {
    fail(
        "{}: the CPU device keeps context of its own only within a cap: give it one with "
        "--gpu-memory",
        percent ? "--percent" : "--gpu-blocks act");
  }
  if (!fixed.resident_layers) {
    fixed.resident_layers =
        percent ? static_cast<std::int32_t>(std::lround((*percent)[0] / kWhole * layers))
                : resident_layers;
  }
  if (percent) {
    fixed.gpu_share = (*percent)[2] / kWhole;
  } else if (gpu_blocks == GpuBlocks::none) {
    fixed.gpu_share = 0;
  }
  fixed.gpu_act_alone = gpu_blocks == GpuBlocks::act;
}

}  // namespace poise

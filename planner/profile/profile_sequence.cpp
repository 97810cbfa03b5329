#include "planner/profile/profile_sequence.h"

#include <algorithm>
#include <utility>

namespace poise {

void ProfileSequence::begin(int rounds, bool heats, bool on_host, bool absorbs) {
  rounds_ = rounds;
  heats_ = heats;
  on_host_ = on_host;
  absorbs_ = absorbs;
  works_.push_back({.work = ProfileWork::prompts_here, .round = 0});
  add([](ProfileWork) { return true; });
}

// Where heat counts, prompts are measured on a busy device, too; once before that they only fill the
// blocks.
void ProfileSequence::add(const std::function<bool(ProfileWork)>& wanted) {
  for (int round = 0; round < rounds_; ++round) {
    for (const ProfileWork work : kProfileWork) {
      const bool prompts = work == ProfileWork::prompts_kv || work == ProfileWork::prompts_act;
      const bool busy = work == ProfileWork::context_busy || (prompts && heats_);
      if (!wanted(work)) {
        continue;
      }
      if (busy && prompts && round == 0) {
        works_.push_back({.work = work, .round = 0, .warms_up = true});
      }
      (busy ? busy_ : works_).push_back({.work = work, .round = round});
    }
    for (const ProfileWork work : {ProfileWork::context_host, ProfileWork::context_host_link}) {
      if (on_host_ && wanted(work)) {
        works_.push_back({.work = work, .round = round});
      }
    }
    if (absorbs_ && wanted(ProfileWork::context_absorbed)) {
      works_.push_back({.work = ProfileWork::context_absorbed, .round = round});
    }
  }
}

// A warm-up comes before each large work of prompts, too.
void ProfileSequence::add_busy(std::size_t warm_ups) {
  const Work warm_up{.work = ProfileWork::context_busy, .round = 0, .warms_up = true};
  works_.assign(warm_ups, warm_up);
  std::ranges::stable_partition(
      busy_, [](const Work& one) { return one.work == ProfileWork::context_busy; });
  for (const Work& work : std::exchange(busy_, {})) {
    if (heats_ && work.work != ProfileWork::context_busy && work.round % kFewestRounds == 0) {
      works_.push_back(warm_up);
    }
    works_.push_back(work);
  }
}

ProfileSequence::Work ProfileSequence::take() {
  const Work work = works_.front();
  works_.pop_front();
  return work;
}

}  // namespace poise

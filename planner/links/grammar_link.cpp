#include "planner/links/grammar_link.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "common/device_memory.h"
#include "common/files/json.h"
#include "common/trouble.h"
#include "planner/links/announce.h"

namespace poise {
namespace {

using Cause = GrammarProcess::Cause;

constexpr std::size_t kMostRefusals = 1024;
constexpr int kMostDeaths = 3;  // over one wish or its start, not by what was computed

}  // namespace

bool GrammarLink::start() {
  if (process_.pid() != 0 || !unusable_.empty()) {
    return process_.pid() != 0;
  }
  if (program_.python.empty()) {
    unusable_ =
        "needs the package llguidance, which is not installed here: `pip install llguidance` in "
        "the environment of poise, or run once where PyPI can be reached";
    return false;
  }
  std::string said;
  const nlohmann::json hello{
      {"model", program_.model}, {"vocab_size", program_.vocab_size}, {"eos", program_.eos}};
  for (int deaths = 0;;) {
    if (const int error = process_.spawn(program_.python, program_.script); error != 0) {
      unusable_ = fmt::format("needs {}: {}", program_.python, std::strerror(error));
      return false;
    }
    process_.be_patient(true);
    if (process_.send(hello.dump()) && process_.receive(said)) {
      break;
    }
    const Lost how = process_.lost();
    if (process_.stopped()) {
      return false;
    }
    ++deaths;
    if (how.cause == Cause::itself || (how.cause == Cause::ended && deaths == kMostDeaths)) {
      unusable_ = fmt::format("cannot be followed: the process of grammars {}", how.how);
      return false;
    }
    go_on_after(how, deaths);
  }
  if (said.starts_with('e')) {
    unusable_ = said.substr(1);
    process_.end();
  }
  return unusable_.empty();
}

GrammarLink::Lost GrammarLink::lost() {
  told_.clear();
  dropped_.clear();
  return process_.lost();
}

void GrammarLink::go_on_after(const Lost& how, int deaths) {
  if (deaths >= kMostDeaths) {
    fail(Exit::interrupted, "the process of grammars {}, {} times in a row", how.how, deaths);
  }
  announce(fmt::format("the process of grammars {}; another one goes on", how.how));
}

// Answers that are not asked for any more go once there are many; one that comes again is told again.
void GrammarLink::forget_others(std::span<const GrammarWish> wishes) {
  if (told_.size() <= 2 * wishes.size() + 64) {
    return;
  }
  std::unordered_set<std::uint32_t> wanted;
  for (const GrammarWish& wish : wishes) {
    wanted.insert(wish.request.n);
  }
  std::erase_if(told_, [&](const auto& told) {
    const bool goes = !wanted.contains(told.first);
    if (goes) {
      dropped_.push_back(told.first);
    }
    return goes;
  });
}

std::string GrammarLink::frame_of(std::span<const GrammarWish> wishes) {
  nlohmann::json frame{{"drop", std::exchange(dropped_, {})}, {"wishes", nlohmann::json::array()}};
  for (const GrammarWish& wish : wishes) {
    nlohmann::json one{{"id", wish.request.n}};
    Told& told = told_[wish.request.n];
    if (told.grammar != wish.grammar || told.tokens > wish.answer.size()) {
      told = {.grammar = wish.grammar};
      one["grammar"] = wish.grammar->text;
    }
    one["tokens"] = wish.answer.subspan(told.tokens);
    told.tokens = wish.answer.size();
    frame["wishes"].push_back(std::move(one));
  }
  return frame.dump();
}

GrammarMask GrammarLink::mask_of(const GrammarWish& wish, const std::string& payload) {
  const auto words = static_cast<std::size_t>(mask_words(program_.vocab_size));
  if (payload.front() == 'm' && payload.size() == 1 + 4 * words) {
    GrammarMask mask{.words = std::vector<std::uint32_t>(words)};
    std::memcpy(mask.words.data(), payload.data() + 1, 4 * words);
    return mask;
  }
  told_.erase(wish.request.n);
  dropped_.push_back(wish.request.n);
  GrammarMask mask{.refusal = payload.substr(1)};
  note_refusal(wish, mask.refusal);
  return mask;
}

// Another request with this grammar is refused without a try. What happens later in an answer is of that answer alone.
void GrammarLink::note_refusal(const GrammarWish& wish, const std::string& sentence) {
  if (wish.answer.empty()) {
    if (refused_.size() >= kMostRefusals) {
      refused_.clear();
    }
    refused_.emplace(wish.grammar->text, sentence);
  }
}

std::size_t GrammarLink::ask(std::span<const GrammarWish> wishes, std::span<GrammarMask> answers) {
  std::size_t answered = 0;
  process_.be_patient(false);
  if (process_.send(frame_of(wishes))) {
    for (std::string payload; answered < wishes.size() && process_.receive(payload); ++answered) {
      answers[answered] = mask_of(wishes[answered], payload);
    }
  }
  return answered;
}

std::vector<GrammarMask> GrammarLink::masks(std::span<const GrammarWish> wishes) {
  forget_others(wishes);
  std::vector<GrammarMask> all(wishes.size());
  std::vector<GrammarWish> open;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < wishes.size(); ++i) {
    const auto refused = refused_.find(wishes[i].grammar->text);
    if (refused != refused_.end()) {
      all[i].refusal = refused->second;
    } else {
      open.push_back(wishes[i]);
      places.push_back(i);
    }
  }
  std::vector<GrammarMask> answers(open.size());
  int deaths = 0, silences = 0;  // of which the first may be a grammar's fault: it takes memory
  for (std::size_t done = 0; done < open.size();) {
    if (process_.stopped()) {
      return {};
    }
    if (!start()) {
      if (process_.stopped()) {
        return {};
      }
      for (; done < open.size(); ++done) {
        answers[done].refusal = unusable_;
      }
      break;
    }
    std::size_t count = 1;  // what it does not know it may die of, so these are asked one by one
    if (knows(open[done].request)) {
      const auto known = [&](const GrammarWish& wish) { return knows(wish.request); };
      const auto rest = std::span(open).subspan(done);
      count = static_cast<std::size_t>(std::ranges::find_if_not(rest, known) - rest.begin());
    }
    const std::size_t answered =
        ask(std::span(open).subspan(done, count), std::span(answers).subspan(done));
    deaths = answered > 0 ? 0 : deaths;
    silences = answered > 0 ? 0 : silences;
    done += answered;
    if (answered == count) {
      continue;
    }
    const Lost how = lost();
    if (process_.stopped()) {
      return {};
    }
    if (how.cause == Cause::silence) {
      go_on_after(how, ++silences);
    } else if (count == 1 && (how.cause == Cause::itself || ++deaths == kMostDeaths)) {
      answers[done].refusal = fmt::format("is too costly: the process of grammars {}", how.how);
      note_refusal(open[done], answers[done].refusal);
      ++done;
      deaths = 0;
    } else if (how.cause != Cause::itself) {
      go_on_after(how, 0);
    }
  }
  for (std::size_t i = 0; i < open.size(); ++i) {
    all[places[i]] = std::move(answers[i]);
  }
  return all;
}

}  // namespace poise

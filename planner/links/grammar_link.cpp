#include "planner/links/grammar_link.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "common/device_memory.h"
#include "common/liveness/progress.h"
#include "common/trouble.h"
#include "planner/links/announce.h"

namespace poise {
namespace {

constexpr std::time_t kMostSilence =
    15;  // seconds; the kernel ends it much earlier (grammar_worker.py)
constexpr std::time_t kLongestStart = 25;
constexpr std::uint32_t kLongest = 64 << 20;
constexpr std::size_t kMostRefusals = 1024;
constexpr int kMostDeaths = 3;  // by signals from outside, over one wish or its start

void wait_at_most(int socket, std::time_t seconds) {
  const timeval most{.tv_sec = seconds, .tv_usec = 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof(most));
}

}  // namespace

bool GrammarLink::start() {
  if (pid_ != 0 || !unusable_.empty()) {
    return pid_ != 0;
  }
  if (program_.python.empty()) {
    unusable_ =
        "needs the package llguidance, which is not installed here: `pip install llguidance` in "
        "the "
        "environment of poise, or run once where PyPI can be reached";
    return false;
  }
  std::string said;
  const nlohmann::json hello{
      {"model", program_.model}, {"vocab_size", program_.vocab_size}, {"eos", program_.eos}};
  for (int deaths = 0; spawn() && !(send(hello.dump()) && receive(said));) {
    const Lost how = lost();
    if (how.itself || ++deaths == kMostDeaths) {
      unusable_ = fmt::format("cannot be followed: the process of grammars {}", how.how);
      return false;
    }
  }
  if (pid_ != 0 && said.starts_with('e')) {
    unusable_ = said.substr(1);
    end();
  } else if (pid_ != 0) {
    wait_at_most(socket_, kMostSilence);
  }
  return pid_ != 0;
}

bool GrammarLink::spawn() {
  std::array<int, 2> pair{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0) {
    fail("the process of grammars: {}", std::strerror(errno));
  }
  wait_at_most(pair[0], kLongestStart);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pair[1], STDIN_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setpgroup(&attributes, 0);  // a terminal's interrupt is not for it
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  std::array<std::string, 3> words{program_.python, "-s", program_.script};
  std::array<char*, 4> argv{words[0].data(), words[1].data(), words[2].data(), nullptr};
  const int error =
      posix_spawn(&pid_, words[0].c_str(), &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(pair[1]);
  socket_ = pair[0];
  if (error != 0) {
    pid_ = 0;
    end();
    unusable_ = fmt::format("needs {}: {}", program_.python, std::strerror(error));
  }
  return error == 0;
}

void GrammarLink::end() {
  if (socket_ >= 0) {
    close(std::exchange(socket_, -1));
  }
  if (pid_ != 0) {
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  told_.clear();
  dropped_.clear();
}

GrammarLink::Lost GrammarLink::lost() {
  close(std::exchange(socket_, -1));
  int status = 0;
  pid_t ended = waitpid(pid_, &status, WNOHANG);
  for (int waited = 0; ended == 0 && waited < 100; ++waited) {  // it closed its socket just now
    usleep(1000);
    ended = waitpid(pid_, &status, WNOHANG);
  }
  Lost lost{.how = "took more than its time of computing"};
  if (ended != 0 && WIFSIGNALED(status) && WTERMSIG(status) != SIGPROF) {
    const int number = WTERMSIG(status);
    lost.how = fmt::format("was ended by signal {}", number);
    lost.itself = number == SIGSEGV || number == SIGABRT || number == SIGBUS || number == SIGILL;
  } else if (ended != 0 && WIFEXITED(status)) {
    lost.how = fmt::format("ended with {}", WEXITSTATUS(status));
    lost.itself = false;
  } else if (ended == 0) {
    lost.how = fmt::format("said nothing for {} s", kMostSilence);
  }
  if (ended != 0) {
    pid_ = 0;
  }
  end();
  return lost;
}

bool GrammarLink::send(const std::string& text) const {
  std::string frame(sizeof(std::uint32_t), '\0');
  const auto length = static_cast<std::uint32_t>(text.size());
  std::memcpy(frame.data(), &length, sizeof(length));
  frame += text;
  for (std::size_t sent = 0; sent < frame.size();) {
    const ssize_t some = ::send(socket_, frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
    if (some < 0 && errno == EINTR) {
      continue;
    }
    if (some <= 0) {
      return false;
    }
    sent += static_cast<std::size_t>(some);
  }
  return true;
}

bool GrammarLink::receive(std::string& payload) const {
  const auto read = [&](char* to, std::size_t size) {
    while (size > 0) {
      const ssize_t some = recv(socket_, to, size, 0);
      if (some < 0 && errno == EINTR) {
        continue;
      }
      if (some <= 0) {
        return false;
      }
      to += some;
      size -= static_cast<std::size_t>(some);
    }
    return true;
  };
  std::uint32_t length = 0;
  if (!read(reinterpret_cast<char*>(&length), sizeof(length)) || length == 0 || length > kLongest) {
    return false;
  }
  note_progress();
  payload.resize(length);
  return read(payload.data(), length);
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
  if (send(frame_of(wishes))) {
    for (std::string payload; answered < wishes.size() && receive(payload); ++answered) {
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
  int deaths = 0;
  for (std::size_t done = 0; done < open.size();) {
    if (!start()) {
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
    done += answered;
    if (answered == count) {
      continue;
    }
    const Lost how = lost();
    if (count == 1 && (how.itself || ++deaths == kMostDeaths)) {
      answers[done].refusal = fmt::format("is too costly: the process of grammars {}", how.how);
      note_refusal(open[done], answers[done].refusal);
      ++done;
      deaths = 0;
    } else if (!how.itself) {
      announce(fmt::format("the process of grammars {}; another one goes on", how.how));
    }
  }
  for (std::size_t i = 0; i < open.size(); ++i) {
    all[places[i]] = std::move(answers[i]);
  }
  return all;
}

}  // namespace poise

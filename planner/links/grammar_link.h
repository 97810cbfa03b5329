#pragma once
// The process of grammars: launch/supervisor/lifecycle/grammar_worker.py, a Python that has llguidance. It says which tokens may come next in an
// answer that has a form. What it says is a function of the grammar and the answer's tokens, so a process that dies is started again and
// told both. A grammar whose compilation or mask takes too long, or kills the process, is refused for its request alone; the kernel ends a
// process that computes too long for one of them. So a process that neither speaks nor computes is halted, by no fault of a grammar: it is
// killed and replaced, and no line is refused for that. Where processes are silent again and again, or are killed while they start,
// `masks` fails (interrupted). One that is killed again and again at work on one wish is that wish's fault: memory ran out. Started when the first request needs it; ends with this object. One thread; `masks` waits.
//
// Frames over a socket pair, each with its length before it (4 bytes). To the process, first {"model", "vocab_size", "eos"}; then
// {"drop": ids, "wishes": [{"id", "grammar", "tokens"}]}, where "grammar" begins an answer and "tokens" follow those of before. From it, for the
// first frame and for each wish in its order: a byte, 'm' or 'e', and a mask's words or an error's text. The answers to a frame come together.
// What the process does not know yet is asked one by one, as is everything after a death: so it is known which wish it died of.

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "planner/links/grammar_process.h"
#include "planner/requests/request.h"

namespace poise {

struct GrammarProgram {
  std::string python, script;  // empty: no Python here has llguidance
  std::string model;           // directory
  std::int32_t vocab_size = 0;
  std::vector<TokenId> eos;
};

struct GrammarWish {
  RequestId request;
  std::shared_ptr<const Grammar> grammar;
  std::span<const TokenId> answer;
};

// One of the two.
struct GrammarMask {
  std::vector<std::uint32_t> words;  // as Sample.mask (common/messages.fbs)
  std::string refusal;
};

class GrammarLink {
 public:
  // `stop` is asked while `masks` waits.
  explicit GrammarLink(GrammarProgram program, std::function<bool()> stop = {},
                       GrammarPatience patience = {})
      : program_(std::move(program)), process_(std::move(stop), patience) {}

  // One for each wish, in their order. None at all once `stop` says so.
  std::vector<GrammarMask> masks(std::span<const GrammarWish> wishes);
  // Whether its grammar was compiled, and the process still has it.
  bool knows(RequestId request) const { return told_.contains(request.n); }
  pid_t pid() const { return process_.pid(); }  // 0: none runs

 private:
  struct Told {  // of a request
    std::shared_ptr<const Grammar> grammar;
    std::size_t tokens = 0;
  };
  using Lost = GrammarProcess::Lost;

  bool start();  // false: `unusable_` says why, or it is to stop
  Lost lost();
  // Another process follows, unless this one was lost too often without an answer in between: then it fails.
  static void go_on_after(const Lost& how, int deaths);
  void forget_others(std::span<const GrammarWish> wishes);
  std::string frame_of(std::span<const GrammarWish> wishes);
  // Answers as many wishes as the process does before it dies.
  std::size_t ask(std::span<const GrammarWish> wishes, std::span<GrammarMask> answers);
  GrammarMask mask_of(const GrammarWish& wish, const std::string& payload);
  void note_refusal(const GrammarWish& wish, const std::string& sentence);

  GrammarProgram program_;
  GrammarProcess process_;
  std::string unusable_;
  std::unordered_map<std::uint32_t, Told> told_;
  std::unordered_map<std::string, std::string> refused_;  // by a grammar's text, why
  std::vector<std::uint32_t> dropped_;  // of told_, which the process has yet to forget
};

}  // namespace poise

#pragma once
// The answers under way. It adds an iteration's results to them, turns finished ones into result lines,
// and gives the scheduler an outcome for each. Pure bookkeeping, one thread. Requests outlive the
// book.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/messages_generated.h"
#include "planner/requests/request_line.h"
#include "planner/results/answer.h"
#include "planner/results/choices.h"
#include "planner/schedule/schedule.h"

namespace poise {

class AnswerBook {
 public:
  // `tokenizer` may be null (--skip-tokenizer-init). All arguments outlive the book.
  AnswerBook(const Tokenizer* tokenizer, const std::vector<TokenId>& eos,
             const std::string& model_name);

  struct Progress {
    std::vector<Outcome> outcomes;   // for the scheduler
    std::vector<ResultLine> lines;   // of requests that are finished
    std::vector<RequestId> failed;   // lines of which a choice failed while others go on
    std::int64_t prompt_tokens = 0;  // of prompts that ran to their end for the first time
    std::int64_t generated_tokens = 0;
    std::int64_t saved_tokens = 0;  // of max_tokens, by requests that ended before
  };
  // `results`: one for each sample of the iteration whose parts these are. Fails (Exit::interrupted)
  // where they are not. `created`: seconds since 1970, for the result lines.
  Progress apply(std::span<const ScheduledChunk> chunks, const messages::IterationDone& results,
                 std::int64_t created);

  // The answer under way; null if there is none. Valid until the next call that is not const.
  const Answer* find(RequestId request) const;
  // Forgets a request that nobody waits for any more. With the last choice of its line also those that have ended.
  void remove(const Request& request);

  // Ends a request that no executor survives: `lines` is its error line, once all choices of the line have
  // ended.
  Progress give_up(const Request& request);
  // The same of a request that turns out to be wrong while it runs; its line and custom_id are filled in here.
  Progress refuse(const Request& request, RequestError why);
  // Whether this choice of a line has ended while others have not.
  bool ended(const Request& request) const { return choices_.ended(request); }

  // What another book needs to continue from this one, in any order, beside the tokens of each answer so
  // far.
  struct Snapshot {
    RequestId request;
    bool prompt_ran = false;
    std::vector<TokenLogprobs> prompt_values;
    std::vector<TokenLogprobs> values;  // of the answer's tokens, where the request wants them
  };
  std::vector<Snapshot> snapshots() const;
  // False if it is inconsistent: the answer would be over already, or is not of this request.
  bool restore(const Request& request, std::span<const TokenId> answer, const Snapshot& begun);

 private:
  struct RunningAnswer {
    Answer answer;
    std::vector<TokenLogprobs> prompt_values;  // until the prompt has run
    bool prompt_ran = false;
  };

  // Returns the token that was sampled, if one was.
  std::optional<TokenId> add(const ScheduledChunk& chunk, const messages::SampleResult* result,
                             RunningAnswer& running, Progress& progress);

  const Tokenizer* tokenizer_;
  const std::vector<TokenId>* eos_;
  const std::string* model_name_;
  std::unordered_map<std::uint32_t, RunningAnswer> answers_;  // by request
  Choices choices_;
};

}  // namespace poise

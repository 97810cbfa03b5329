#pragma once
// What has been answered of one request so far: tokens in, text out, and the decision that it is finished (EOS, stop ids, stop strings,
// max_tokens; behaviour of vLLM). Pure bookkeeping on one request: no clock, file or socket; one thread. Its state is a function of the
// request and the tokens pushed, so that a restart replays it. It keeps text and logprobs, not the tokens: those the scheduler has.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/requests/request.h"

namespace poise {

class Tokenizer;
class Detokenizer;

enum class FinishReason { stop, length, error };

class Answer {
 public:
  // `request` outlives this. `tokenizer` is null with --skip-tokenizer-init: text is empty then, and stop strings were refused before.
  Answer(const Request& request, const Tokenizer* tokenizer, const std::vector<TokenId>& eos);
  Answer(Answer&&) noexcept;
  Answer& operator=(Answer&&) noexcept;
  ~Answer();

  // The values of the echoed prompt, one for each prompt token but the first; once, before the first push, only with prompt_logprobs().
  void set_prompt_values(std::vector<TokenLogprobs> values);
  // One more sampled token. REQUIRES: not finished. `logprobs` is ignored if the request wants none.
  void push(TokenId token, TokenLogprobs logprobs);
  // Ends the request with an error line: the logits were not finite, or every token was barred.
  void break_off(bool barred = false);
  // A request that only scores its prompt (max_tokens 0) is finished as soon as its prompt was run.
  void finish_scoring();

  bool finished() const { return reason_.has_value(); }
  FinishReason reason() const { return *reason_; }
  // Tokens pushed so far.
  std::int32_t size() const { return size_; }
  // The text that no later token changes: without what may yet become a stop string. It only grows.
  std::string_view settled_text() const;
  // Appends the logprobs of its tokens from `first` on, as `result_line` has them. `tokens`: all that were pushed.
  // REQUIRES: the request wants logprobs, and does not echo its prompt.
  void append_logprobs_from(std::string& out, std::span<const TokenId> tokens, std::size_t first) const;
  // The logprobs of those tokens, if the request wants them: another answer that is given the same becomes equal.
  const std::vector<TokenLogprobs>& values() const { return values_; }
  const std::vector<TokenLogprobs>& prompt_values() const { return prompt_values_; }

  // The choice that the line holds, as JSON; `tokens`: those that were pushed. REQUIRES: finished(), without an error.
  std::string choice_text(std::span<const TokenId> tokens) const;
  // What stands beside the choices, with its comma: the prompt's ids and logprobs of a chat, where they are wanted.
  std::string beside_choices() const;
  // The whole line, if it failed. REQUIRES: finished() with an error.
  std::string error_line_text() const;

 private:
  std::string of_the_prompt() const;
  void finish(FinishReason reason);
  bool cut_at_stop_string(std::size_t searched);
  void append_text(std::string& out, std::span<const TokenId> tokens) const;

  const Request* request_;
  const Tokenizer* tokenizer_;
  const std::vector<TokenId>* eos_;
  std::int32_t size_ = 0;
  std::vector<TokenLogprobs> values_;         // of the answer, with logprobs
  std::vector<TokenLogprobs> prompt_values_;  // with prompt_logprobs
  std::unique_ptr<Detokenizer> detokenizer_;
  std::string text_;  // of the answer; ends before a stop string once one was found
  std::optional<FinishReason> reason_;
  bool barred_ = false;                       // an error because of that
  const std::string* stop_string_ = nullptr;  // what ended it, if it was one of the request's
  std::optional<TokenId> stop_id_;
};

// What a result line says of a request with these choices, and what stands `beside` them; `tokens`: of all of them. `created` is when, in
// seconds since 1970; the rest does not depend on it.
std::string response_body(const Request& request, std::span<const std::string> choices,
                          const std::string& beside, std::size_t tokens,
                          const std::string& model_name, std::int64_t created);

}  // namespace poise

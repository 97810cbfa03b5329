#pragma once
// What the tests of answers share: a tokenizer, a request to answer, and the line that comes of
// pushing tokens.

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "planner/results/answer.h"
#include "planner/results/choices.h"
#include "tests/planner/requests/request_support.h"

namespace poise::testing_support {

inline const std::vector<TokenId> kEosList{kEos};

// An answer and the tokens that were pushed to it, which in a run the scheduler keeps.
class KeptAnswer : public Answer {
 public:
  KeptAnswer(const Request& request, const Tokenizer* tokenizer, const std::vector<TokenId>& eos)
      : Answer(request, tokenizer, eos), request_(&request) {}
  void push(TokenId token, TokenLogprobs logprobs) {
    Answer::push(token, std::move(logprobs));
    tokens_.push_back(token);
  }
  const std::vector<TokenId>& tokens() const { return tokens_; }
  std::string result_line(const std::string& model_name, std::int64_t created = 0) const {
    return Choices().add(*request_, *this, tokens_, model_name, created)->text;
  }

 private:
  const Request* request_;
  std::vector<TokenId> tokens_;
};

class AnswerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { tokenizer_ = new Tokenizer(testing_support::byte_tokenizer()); }
  static void TearDownTestSuite() { delete tokenizer_; }

  static Request request(std::int32_t max_tokens = 8) {
    Request made{{12}, "a", {kEos, byte_id('p')}, "", {}};
    made.sampling.max_tokens = max_tokens;
    return made;
  }
  // Pushes until finished; returns the whole line.
  static nlohmann::json answered(const Request& request, const std::vector<TokenId>& tokens) {
    KeptAnswer answer(request, tokenizer_, kEosList);
    for (const TokenId token : tokens) {
      if (answer.finished()) {
        ADD_FAILURE() << "finished before token " << token;
        break;
      }
      answer.push(token, {-1.0f, {}});
    }
    EXPECT_TRUE(answer.finished());
    return answer.finished() ? nlohmann::json::parse(answer.result_line("model"))
                             : nlohmann::json();
  }
  static nlohmann::json choice(const Request& request, const std::vector<TokenId>& tokens) {
    return answered(request, tokens)["response"]["body"]["choices"][0];
  }
  static std::vector<TokenId> bytes(std::string_view text) {
    std::vector<TokenId> ids;
    for (const char c : text) {
      ids.push_back(byte_id(static_cast<unsigned char>(c)));
    }
    return ids;
  }

  inline static Tokenizer* tokenizer_ = nullptr;
};

}  // namespace poise::testing_support

#include "planner/results/choices.h"

#include "planner/results/result_line.h"
#include "tests/planner/results/answer_support.h"

namespace poise {
namespace {

using nlohmann::json;
using testing_support::kEosList;

class ChoicesTest : public testing_support::AnswerTest {
 protected:
  static Request choice_of(std::int32_t choice, std::int32_t choices) {
    Request made = request(2);
    made.choices = choices;
    made.choice = choice;
    if (choice > 0) {
      made.first_choice = made.id;
      made.id = {kFirstFurtherChoice + static_cast<std::uint32_t>(choice)};
    }
    return made;
  }
  std::optional<ResultLine> end(const Request& asked, std::string_view text) {
    Answer answer(asked, tokenizer_, kEosList);
    const std::vector<TokenId> tokens = bytes(text);
    for (const TokenId token : tokens) {
      answer.push(token, {});
    }
    return choices_.add(asked, answer, tokens, "m", 0);
  }

  Choices choices_;
};

TEST_F(ChoicesTest, ALineComesWithItsLastChoiceAndHoldsThemInOrder) {
  EXPECT_FALSE(end(choice_of(2, 3), "yz"));
  EXPECT_TRUE(choices_.ended(choice_of(2, 3)));
  EXPECT_FALSE(choices_.ended(choice_of(1, 3)));
  EXPECT_FALSE(end(choice_of(0, 3), "ab"));
  const auto line = end(choice_of(1, 3), "cd");
  ASSERT_TRUE(line);
  EXPECT_EQ(line->request.n, 12u);
  EXPECT_FALSE(line->error);
  const json whole = json::parse(line->text);
  EXPECT_EQ(whole["id"], "poise-12");
  const json& body = whole["response"]["body"];
  ASSERT_EQ(body["choices"].size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(body["choices"][i]["index"], i);
    EXPECT_EQ(body["choices"][i]["text"], std::string_view("abcdyz").substr(2 * i, 2));
  }
  EXPECT_EQ(body["usage"],
            json::parse(R"({"prompt_tokens":2,"completion_tokens":6,"total_tokens":8})"));
  EXPECT_FALSE(choices_.ended(choice_of(1, 3)));
}

TEST_F(ChoicesTest, OneThatFailsMakesTheLineAnErrorOnceAllHaveEnded) {
  EXPECT_FALSE(choices_.fail(choice_of(1, 3), "first"));
  EXPECT_FALSE(end(choice_of(0, 3), "ab"));
  const auto line = choices_.fail(choice_of(2, 3), "second");
  ASSERT_TRUE(line);
  EXPECT_TRUE(line->error);
  EXPECT_EQ(line->text, "first");
}

TEST_F(ChoicesTest, OfOneChoiceTheLineComesAtOnce) {
  EXPECT_TRUE(end(choice_of(0, 1), "ab"));
  EXPECT_EQ(choices_.fail(choice_of(0, 1), "gone")->text, "gone");
}

}  // namespace
}  // namespace poise

#pragma once
// Finds added tokens in a text, as HuggingFace's `tokenizers` does: those that are not `normalized`
// in the text, then the others, normalized, in what lies between and was normalized; of those that
// begin at one place the longest.
// Immutable; any number of threads may search at once.

#include <bitset>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "planner/tokenizer/description.h"
#include "planner/tokenizer/normalizer.h"

namespace poise {

class AddedTokenFinder {
 public:
  // Fails if the normalizer leaves nothing of a token.
  AddedTokenFinder(const std::vector<AddedToken>& tokens, const Normalizer& normalizer);

  struct TextPart {
    std::string_view text;
    const AddedToken* token;  // nullptr: plain text
  };
  // The text as added tokens and what lies between. The tokens must outlive the parts.
  std::vector<TextPart> split(std::string_view text) const;
  // The same of a normalized text, with those tokens that are `normalized`.
  std::vector<TextPart> split_normalized(std::string_view text) const;

 private:
  // The contents as a tree of bytes. Node 0 is the root.
  class Tree {
   public:
    void add(std::string_view content, const AddedToken& token);
    void split(std::string_view text, std::vector<TextPart>& parts) const;

   private:
    struct Found {
      const AddedToken* token = nullptr;
      std::size_t end = 0;
    };
    Found longest_at(std::string_view text, std::size_t at) const;

    std::unordered_map<std::uint64_t, std::uint32_t> children_;  // node << 8 | byte → node
    std::vector<const AddedToken*> ends_{nullptr};               // beside each node
    std::bitset<256> first_bytes_;
  };

  Tree plain_, normalized_;
};

}  // namespace poise

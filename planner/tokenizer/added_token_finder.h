#pragma once
// Finds added tokens in a text, as HuggingFace's `tokenizers` does: those that are not `normalized`
// in the text, then the others in what lies between; of those that begin at one place the longest.
// Immutable; any number of threads may search at once.

#include <bitset>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "planner/tokenizer/description.h"

namespace poise {

class AddedTokenFinder {
 public:
  explicit AddedTokenFinder(const std::vector<AddedToken>& tokens);

  struct TextPart {
    std::string_view text;
    const AddedToken* token;  // nullptr: plain text
  };
  // The text as added tokens and what lies between. The tokens must outlive the parts.
  std::vector<TextPart> split(std::string_view text) const;

 private:
  // The contents as a tree of bytes. Node 0 is the root.
  class Tree {
   public:
    void add(const AddedToken& token);
    void split(std::string_view text, std::vector<TextPart>& parts) const;

   private:
    const AddedToken* longest_at(std::string_view text, std::size_t at) const;

    std::unordered_map<std::uint64_t, std::uint32_t> children_;  // node << 8 | byte → node
    std::vector<const AddedToken*> ends_{nullptr};               // beside each node
    std::bitset<256> first_bytes_;
  };

  Tree plain_, normalized_;
};

}  // namespace poise

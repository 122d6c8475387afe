"""Texts that tokenizers like to get wrong."""

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces before and after  ",
    "a\nb\n\nc\r\nd\te\t\tf   \n   g",
    "1234567890 3.14159 007 1,000,000 x1y22z333 ²³ Ⅷ ٣٤٥",
    "It's he'll we'd I'M YOU'RE don’t ’s",
    "snake_case camelCase SCREAMING ÄÖÜ ßstraße ÉcoLe ΑΒΓαβγ",
    "naïve café — cafe\u0301 e\u0301\u0301",
    "日本語のテキストと中文文本，한국어 ไทย हिन्दी العربية עברית",
    "🙂🚀 👩‍👩‍👧 🇨🇭 ❤️ 🏽",
    "\u00a0\u2003\u200b\u3000\ufeff",
    "def f(x):\n    return x ** 2  # comment\n\n\tif a != b: pass",
    "https://example.org/a/b?c=d&e=f#g /usr/local//bin\\path",
    "<s> </s> <unk> <0x0A> ▁▁ Ġ Ċ <|im_start|>",
    "control \x00\x01\x1f\x7f\x80 bytes",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U000e0041 \U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "...!!!???---===***'''\"\"\"((([[[{{{",
]

"""The OpenAI protocol in front of SGLang: requests are checked and passed on."""

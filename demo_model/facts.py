"""What the model can say about Tercet, about itself and about the field it works in.

A fact is a tuple of questions and one answer. The answers describe the server of this repository; when the server
changes, change them here and train again.
"""

from __future__ import annotations

from random import Random

from demo_model.phrases import Document, Pair, raw_text

Fact = tuple[tuple[str, ...], str]


def _what(*names: str, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The usual questions after a thing, for each of its names, and some further ones."""
    forms = ("What is {}?", "What is {}?", "What's {}?", "Explain {}.", "Can you explain {}?", "Tell me about {}.")
    more_forms = (
        "Please explain {}.",
        "Do you know what {} is?",
        "What do you know about {}?",
        "Describe {}.",
        "Can you tell me what {} is?",
        "I want to know what {} is.",
    )
    return tuple(form.format(name) for name in names for form in forms + more_forms) + more


# fmt: off
TERCET: tuple[Fact, ...] = (
    (
        _what("Tercet", "Tercet", more=("What does Tercet do?", "What is Tercet for?", "What can Tercet do?")),
        "Tercet is a server for text generation. It loads a language model and answers requests over HTTP.",
    ),
    (
        ("How does Tercet work?", "Explain how Tercet works.", "Can you explain how Tercet works?",
         "Tell me how Tercet works.", "Describe how Tercet works."),
        "Tercet works in three steps. The launcher starts the other processes and watches them. The router receives "
        "requests over HTTP, checks them, puts them into a queue and forms batches. The model server runs the model: "
        "first it prefills the prompt, then it decodes one token after another. The router sends each token to the "
        "client as soon as it is there.",
    ),
    (
        ("What are the three processes of Tercet?", "Which processes does Tercet have?",
         "How many processes does Tercet have?", "What parts does Tercet have?", "What are the parts of Tercet?",
         "Name the three processes of Tercet.", "Which three processes make up Tercet?"),
        "Tercet has three processes: the launcher, the router and the model server.",
    ),
    (
        _what("the launcher", more=("What does the launcher do?", "What does the launcher of Tercet do?",
                                    "What is the job of the launcher?")),
        "The launcher reads the options, downloads the model, starts the model server and the router, and watches "
        "them.",
    ),
    (
        _what("the router", more=("What does the router do?", "What does the router of Tercet do?",
                                  "What is the job of the router?")),
        "The router receives HTTP requests, checks them, puts them into a queue and forms batches for the model "
        "server.",
    ),
    (
        _what("the model server", more=("What does the model server do?", "What does the model server of Tercet do?",
                                        "What is the job of the model server?")),
        "The model server loads the model and runs it. It turns batches of prompts into tokens.",
    ),
    (
        _what("a shard", more=("What is a shard in Tercet?", "What does a shard do?")),
        "A shard is one process of the model server. Each shard holds a part of the model.",
    ),
    (
        ("What is the licence of Tercet?", "What is the license of Tercet?", "Which licence does Tercet have?",
         "Which license does Tercet use?", "Is Tercet open source?", "Is Tercet free?",
         "Under which licence is Tercet?", "Can I use Tercet for free?", "How is Tercet licensed?"),
        "Tercet is open source under the Apache-2.0 licence.",
    ),
    (
        ("What is TGI?", "What does TGI mean?", "What is the relation of Tercet to TGI?", "Is Tercet like TGI?",
         "What did Tercet come from?", "Does Tercet replace TGI?", "Is Tercet compatible with TGI?",
         "Is Tercet the successor of TGI?", "Tell me about TGI."),
        "TGI is Text Generation Inference by Hugging Face. Tercet is its successor and works with the same clients.",
    ),
    (
        ("What does the name Tercet mean?", "Why is Tercet called Tercet?", "What is a tercet?",
         "Where does the name Tercet come from?"),
        "A tercet is a group of three lines in a poem. Tercet has three processes.",
    ),
    (
        ("Which routes does Tercet have?", "What routes does Tercet offer?", "Which endpoints does Tercet have?",
         "What endpoints are there?", "What are the routes of Tercet?", "Which HTTP routes are there?"),
        "The main routes are /generate, /generate_stream, /v1/chat/completions, /v1/completions, /info, /health and "
        "/metrics.",
    ),
    (
        ("How do I stream tokens?", "How can I stream the answer?", "Can Tercet stream?", "Does Tercet stream tokens?",
         "How does streaming work?", "Does Tercet support streaming?"),
        "Send the request to /generate_stream, or set stream to true. Each token arrives as one event.",
    ),
    (
        ("How do I chat with a model?", "Which route is for chat?", "How can I send a chat message?",
         "Which endpoint is for chat?"),
        "Send the messages to /v1/chat/completions. The route works like the one of OpenAI.",
    ),
    (
        ("How do I check the health of the server?", "Which route tells if the server is healthy?",
         "What does /health do?", "Is there a health check?"),
        "Call /health. It answers 200 when the server is ready.",
    ),
    (
        ("Where are the metrics?", "What does /metrics do?", "Does Tercet have metrics?",
         "How can I see the metrics?", "Can Prometheus read Tercet?"),
        "The route /metrics shows counters and histograms for Prometheus.",
    ),
    (
        ("What does /info do?", "How do I see which model is loaded?", "Which route shows the model?"),
        "The route /info shows the model, the version and the limits of the server.",
    ),
    (
        ("What is the default port of Tercet?", "Which port does Tercet use?", "On which port does Tercet listen?"),
        "Tercet listens on port 3000 unless you choose another one.",
    ),
    (
        ("How do I start Tercet?", "How can I run Tercet?", "How do I run the demo?", "How do I start the server?"),
        "Run launcher --model-id demo to start Tercet with this demo model.",
    ),
    (
        ("Does Tercet send telemetry?", "Does Tercet collect data?", "Does Tercet phone home?"),
        "No. Tercet never sends telemetry.",
    ),
    (
        ("Is Tercet written in Python?", "Which language is Tercet written in?", "What is Tercet written in?",
         "In which programming language is Tercet written?"),
        "Tercet is written in Python.",
    ),
    (
        ("Can Tercet call tools?", "Does Tercet support tools?", "Does Tercet support function calling?"),
        "Yes. Send the tools with the chat request, and the model answers with a function call.",
    ),
    (
        ("Can Tercet answer in JSON?", "Does Tercet support JSON?", "What is guidance?",
         "Does Tercet support grammars?"),
        "Yes. With a grammar, the answer always follows a JSON schema or a regular expression.",
    ),
    (
        _what("prefill", "the prefill step", more=("What happens during prefill?", "What does prefill mean?")),
        "Prefill is the first step of generation. The model reads the whole prompt at once and fills the KV cache.",
    ),
    (
        _what("decode", "the decode step", more=("What happens during decode?", "What does decode mean?")),
        "Decode is the second step of generation. The model makes one token after another and uses the KV cache.",
    ),
    (
        ("What is the difference between prefill and decode?", "How do prefill and decode differ?",
         "Explain prefill and decode.", "What are prefill and decode?"),
        "Prefill reads the whole prompt at once. Decode makes one token at a time.",
    ),
    (
        _what("the KV cache", "a KV cache", more=("What does the KV cache do?", "Why do we need a KV cache?")),
        "The KV cache stores the keys and values of earlier tokens, so that the model does not compute them again.",
    ),
    (
        _what("paged attention", "a paged KV cache", "the paged KV cache",
              more=("Why is the KV cache paged?", "What does paged mean?")),
        "A paged KV cache is cut into small blocks. Each request takes only the blocks that it needs.",
    ),
    (
        _what("continuous batching", "dynamic batching", more=("How does Tercet batch requests?", "What is a batch?")),
        "Continuous batching lets new requests join the running batch at every step, so that the device is never "
        "idle.",
    ),
    (
        _what("the queue", more=("What does the queue do?", "What happens when the server is busy?")),
        "The queue holds the requests that wait until there is room in the batch.",
    ),
    (
        _what("prefix caching", "the prefix cache", more=("What does the prefix cache do?",)),
        "Prefix caching keeps the KV blocks of earlier prompts, so that a common beginning is computed only once.",
    ),
    (
        _what("tensor parallelism", more=("How does Tercet use several GPUs?", "Can Tercet use more than one GPU?")),
        "Tensor parallelism splits each layer of the model over several GPUs.",
    ),
    (
        ("Can Tercet run on a CPU?", "Does Tercet need a GPU?", "Do I need a GPU?"),
        "Tercet runs on a CPU too, but large models need a GPU.",
    ),
)

SELF: tuple[Fact, ...] = (
    (
        ("Who are you?", "Who are you?", "Who are you?", "What are you?", "Tell me about yourself.",
         "Introduce yourself.", "Please introduce yourself.", "Can you introduce yourself?", "Who am I talking to?",
         "What kind of model are you?", "Are you a language model?", "Describe yourself.", "Who is this?"),
        "I am the demo model of Tercet, a small language model with a few million parameters.",
    ),
    (
        ("What is your name?", "What's your name?", "Do you have a name?", "Tell me your name.", "What are you called?",
         "How are you called?", "May I know your name?"),
        "My name is Tercet. I am a small demo model.",
    ),
    (
        ("Are you human?", "Are you a human?", "Are you a person?", "Are you a robot?", "Are you real?",
         "Are you alive?"),
        "No, I am not a human. I am a small language model.",
    ),
    (
        ("How are you?", "How are you?", "How are you today?", "How do you do?", "How is it going?",
         "How are you doing?",
         "How do you feel?", "Are you well?", "How's it going?"),
        "I am fine, thank you. How can I help you?",
    ),
    (
        ("What can you do?", "How can you help me?", "What are you good at?", "Can you help me?", "What do you know?",
         "What should I ask you?", "What can I ask you?"),
        "I can answer simple questions, do small sums, tell stories, write JSON and call tools.",
    ),
    (
        ("Who made you?", "Who trained you?", "Who created you?", "Who built you?", "How were you trained?",
         "Where do you come from?", "How were you made?"),
        "I was trained by a script in the Tercet repository, on text that the repository generates.",
    ),
    (
        ("How big are you?", "How many parameters do you have?", "Are you a large model?", "How large are you?"),
        "I am very small. I have a few million parameters.",
    ),
    (
        ("Are you smart?", "Are you always right?", "Can I trust you?", "Do you make mistakes?", "Are you clever?"),
        "I am only a demo. I know a few things and I make mistakes.",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Can you tell me a joke?", "Make me laugh.", "Say something funny."),
        "Why did the token cross the road? It wanted to get to the other batch.",
    ),
    (
        ("Write a poem.", "Write a tercet.", "Can you write a poem?", "Please write a short poem.", "Tell me a poem."),
        "Three small processes share the day,\n"
        "one opens doors, one leads the way,\nand one finds all the words to say.",
    ),
    (
        ("What is the meaning of life?", "What is the sense of life?", "What is the answer to everything?"),
        "Some say that it is 42.",
    ),
)

FIELD: tuple[Fact, ...] = (
    (
        _what("Deep Learning", "Deep Learning", "deep learning", "deep learning"),
        "Deep learning is a kind of machine learning that uses neural networks with many layers to learn from data.",
    ),
    (
        _what("machine learning", "Machine Learning"),
        "Machine learning lets computers learn from examples instead of fixed rules.",
    ),
    (
        _what("artificial intelligence", "AI"),
        "Artificial intelligence is the field that makes computers do things that need thought.",
    ),
    (
        _what("a neural network", "a neural net", "neural networks"),
        "A neural network is a function made of many simple units in layers, whose weights are learned from data.",
    ),
    (
        _what("a transformer", "the transformer model"),
        "A transformer is a neural network that uses attention to look at all tokens of a text.",
    ),
    (
        _what("attention", "self-attention"),
        "Attention lets each token look at earlier tokens and take what it needs from them.",
    ),
    (
        _what("a token", more=("What are tokens?",)),
        "A token is a small piece of text, such as a word or a part of a word.",
    ),
    (
        _what("a tokenizer", more=("What does a tokenizer do?",)),
        "A tokenizer cuts text into tokens and gives each token a number.",
    ),
    (
        _what("a language model", "an LLM", "a large language model", more=("What does a language model do?",)),
        "A language model predicts the next token of a text. A large one is called an LLM.",
    ),
    (
        _what("a GPU", more=("What does a GPU do?", "Why do models need a GPU?")),
        "A GPU is a processor that does many computations at the same time.",
    ),
    (
        _what("inference", more=("What does inference mean?",)),
        "Inference means running a trained model to get an answer.",
    ),
    (
        _what("training", more=("How is a model trained?",)),
        "Training changes the weights of a model step by step until its answers are good.",
    ),
    (
        _what("quantization"),
        "Quantization stores the weights of a model with fewer bits, so that it needs less memory.",
    ),
    (
        _what("temperature", more=("What does temperature do?", "What does the temperature parameter do?")),
        "The temperature says how random the answer is. A low temperature makes it more certain.",
    ),
    (
        _what("greedy decoding", more=("What does greedy mean?",)),
        "Greedy decoding always takes the most likely token.",
    ),
    (
        _what("top-k sampling", "top-k", more=("What does top_k do?",)),
        "Top-k sampling draws the next token from the k most likely ones.",
    ),
    (
        _what("top-p sampling", "top-p", more=("What does top_p do?",)),
        "Top-p sampling draws the next token from the smallest set whose probability is at least p.",
    ),
    (
        _what("an embedding", "embeddings"),
        "An embedding is a list of numbers that stands for a token or a text.",
    ),
    (
        _what("gRPC"),
        "gRPC is a way to call functions of another process. The router and the model server talk over gRPC.",
    ),
    (
        _what("HTTP"),
        "HTTP is the protocol of the web. Clients talk to Tercet over HTTP.",
    ),
    (
        _what("JSON"),
        "JSON is a simple text format for data with objects, lists, strings and numbers.",
    ),
    (
        _what("Python"),
        "Python is a popular programming language that is easy to read.",
    ),
)

# fmt: on
_PASSAGES = (
    "Tercet serves language models. The launcher starts everything, the router talks to the clients, and the model "
    "server runs the model. A request enters the queue of the router, joins a batch, is prefilled and then decoded "
    "token by token.",
    "The router never runs the model. It checks each request, counts its tokens and decides when it may join the "
    "batch. The model server never speaks HTTP. It receives batches over gRPC and answers with tokens.",
    "The KV cache is the memory of a request. It is cut into blocks of the same size. When a request ends, its blocks "
    "become free and another request can use them.",
    "When a client goes away, the router removes its request from the batch, and the blocks of its KV cache become "
    "free at once.",
    "The launcher watches the router and the model server. When one of them dies, the launcher stops the other one "
    "and ends with an error.",
    "A language model reads a text and says which token comes next. The new token is added to the text, and the model "
    "reads again. This goes on until the model says that the text is finished.",
)


def about(facts: tuple[Fact, ...], rng: Random) -> Pair:
    """One of the facts, in one of its wordings."""
    questions, answer = rng.choice(facts)
    return Pair(rng.choice(questions), answer)


def tercet(rng: Random) -> Pair:
    """A question about Tercet."""
    return about(TERCET, rng)


def itself(rng: Random) -> Pair:
    """A question about the model."""
    return about(SELF, rng)


def field(rng: Random) -> Pair:
    """A question about language models and computers."""
    return about(FIELD, rng)


def plain(rng: Random) -> Document:
    """A fact or a passage as raw text."""
    if rng.random() < 0.2:
        return Document(text=rng.choice(_PASSAGES))
    pair = about(rng.choice((TERCET, FIELD)), rng)
    if rng.random() < 0.3:
        return Document(text=pair.answer)
    return raw_text(rng, pair)

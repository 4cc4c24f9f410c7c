"""Words for needle keys. RULER takes some 7 million pairs from the `wonderwords` package; these lists give 38 502.

They are our own, so that nothing is fetched: plain English, lower case, without hyphens, no word in both lists.
"""

_ADJECTIVES = """
able agile alert amber ample ancient angular arctic ardent austere autumn awake bald balmy basic bold bouncy brash
brave breezy brief bright brisk broad bronze bubbly burly busy calm candid careful casual cheerful chilly chubby civic
classic clean clever cloudy clumsy coastal cold compact copper cordial cosmic cosy crafty crimson crisp crooked cubic
curious curly daily damp dapper daring dark dazzling deep deft dense devoted digital dim distant docile dreamy dusty
dutiful eager early earnest eastern elastic elegant elder eminent empty endless epic equal exact exotic fabled faint
fair famous fancy fearless fertile festive fierce final firm fluent fluffy fond formal fragile frank fresh friendly
frosty frugal funny fuzzy gallant gaudy gentle giant giddy gifted glad gleaming glossy golden graceful grand grassy
grateful gray greedy green gritty grumpy handy happy hardy harmless hasty hazel hearty heavy helpful hidden hollow
honest hopeful huge humble humid hungry hushed icy ideal idle immense indigo inland inner innocent intense inward
ivory jagged jolly jovial joyful juicy jumbo keen kind large lavish lazy leafy lean level light likely linear little
lively local lofty lonely long loud lovely loyal lucid lucky lunar
"""

_NOUNS = """
acorn acrobat almond anchor antler apple apron arcade archer arrow atlas attic author badge badger bagel bakery ballad
bamboo banjo banner barley barrel basin basket beacon beaver bench berry bicycle blanket blossom boulder bracelet
branch bridge broom bucket buffalo bugle butter button cabin cactus camel candle canoe canvas canyon captain carpet
carrot castle cavern cedar cello chalk chapel cheetah cherry chimney circus citadel clarinet clover cobbler cobra
coconut comet compass copperhead coral cottage cousin coyote cradle crane crater cricket crown crystal cushion cyclone
dagger daisy dancer desert diamond dinner diver dolphin donkey dragon drawer drummer eagle easel echo elbow elephant
ember emerald engine envelope fabric falcon farmer feather fender fiddle finch flannel flask flute forest fossil
fountain fox galaxy garage garden garlic geyser ginger giraffe glacier goblet gondola goose gorilla granite grape
guitar hammer hammock harbor harp harvest hawk hazelnut hedge helmet heron hilltop honey horizon hornet island ivy
jacket jaguar jasmine jewel jigsaw journal juniper kayak kernel kettle kitten knight koala ladder ladle lagoon lantern
lapel lemon leopard letter lettuce lilac lizard llama lobster locket lotus lynx magnet mammoth mango maple marble
market meadow melon mermaid meteor mirror mitten moccasin monsoon moose mosaic mountain muffin mustard napkin nectar
needle nickel notebook nutmeg oasis ocean octopus olive
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())

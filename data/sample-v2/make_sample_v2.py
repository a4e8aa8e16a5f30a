#!/usr/bin/env python3
"""Write the second sample, train.json and dev.json, in SQuAD v2.0 format, next to this file.

    python data/sample-v2/make_sample_v2.py              # rewrites both files, to the same bytes every time
    python data/sample-v2/make_sample_v2.py --out DIR    # writes them somewhere else

It is small and awkward on purpose: a fifth of its questions have no answer, two contexts in each file are longer than
one window of 384 tokens, and the short ones mix scripts, accents (composed and decomposed), emoji, dashes, curly
quotes and no-break spaces. The texts below are fiction. Characters that are hard to see are written as escapes.

Each paragraph is a context and its questions: (question, answer, ...) or, when it cannot be answered from the context,
(question, None, plausible answer). An answer must occur exactly once in its context unless it is followed by "#n",
which means its n-th occurrence.
"""

import argparse
import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent

TRAIN = {
    "The Tollan Salt Road": [
        (
            "For almost three hundred years the salt that was eaten in the valleys of Tollan came over the mountains "
            "on the backs of mules. The road was never more than two metres wide, and in many places it was a ledge "
            "that had been cut into the rock with hammers. A caravan needed eleven days to get from the pans at Ossel "
            "to the weighing house in Brund, provided that no bridge had been swept away. The drivers, who were known "
            "as whites because of the dust on their coats, travelled in groups of twelve and chose a leader by "
            "drawing straws. Whoever drew the shortest walked in front, carried the horn and was paid one coin more "
            "than the rest.\n"
            "The rules of the road were strict. Mules coming down had to wait for mules going up, nobody was allowed "
            "to sing below the glacier, and a driver who lost a sack had to replace it out of his own pocket. In "
            "return the town of Brund kept four shelters, each with a stove, a bell and a shelf of dry bread. The "
            "highest of them, called the Nail, stood at 2,340 metres and was looked after by a family named Quist. "
            "Old Berit Quist is said to have rung the bell for two whole days during the storm of 1741, and nineteen "
            "people who heard it reached her door alive. When the council offered her a medal, she asked for a new "
            "roof instead.\n"
            "Salt was dear, and where goods are dear there are thieves. The most famous was a man called Pock, who "
            "never used a weapon. He waited until a caravan had gone to sleep, cut a small hole in every sack, and in "
            "the morning followed the mules with a broom. It took the guards six summers to notice. He was tried in "
            "Brund before Judge Hallam Reve, who laughed so much when he heard the story that the trial had to be put "
            "off until the afternoon. Pock was ordered to sweep the market square every Saturday for ten years, and "
            "it was never so clean again.\n"
            "The end came slowly. In 1822 a company from the coast began to bring salt up the river by barge, at half "
            "the price. One by one the drivers sold their animals, and by 1836 only a single caravan a year still "
            "crossed the pass. The weighing house became a dance hall. Three of the shelters fell down, and the "
            "stones were used for sheepfolds. Nobody gave much thought to the road until a teacher, Ilse Marenko, "
            "walked it with her pupils in the spring of 1907. She drew a map of every turn, collected the names of "
            "the places, and wrote down eighty-one songs that the last drivers had taught their grandchildren. Her "
            "notebooks lay in a cupboard for half a century before they were printed. Today the road is a footpath "
            "marked with a white mule, and the Nail is a shelter once more; the stove was paid for by a brewery, "
            "while the bell, which had been sold to a school, was returned by the children themselves. Walkers who "
            "ring it are asked to do so only in fog.",
            [
                ("How many days did a caravan need to get to Brund?", "eleven"),
                (
                    "Why were the drivers known as whites?",
                    "because of the dust on their coats",
                    "the dust on their coats",
                ),
                ("How was the leader of a group chosen?", "by drawing straws", "drawing straws"),
                ("What was the highest shelter called?", "the Nail#1", "Nail#1"),
                ("What did Berit Quist ask for instead of a medal?", "a new roof"),
                ("What did Pock use to collect the salt?", "a broom"),
                ("Before which judge was Pock tried?", "Judge Hallam Reve", "Hallam Reve"),
                ("In what year did a company begin to bring salt up the river?", "1822"),
                ("Who walked the road with her pupils in 1907?", "Ilse Marenko", "a teacher, Ilse Marenko"),
                ("How many songs did the teacher write down?", "eighty-one songs", "eighty-one"),
                ("Who paid for the stove?", "a brewery"),
                ("When are walkers asked to ring the bell?", "only in fog", "in fog"),
                ("How much did the company from the coast pay its bargemen?", None, "half the price"),
                ("Who printed the songs of the drivers in 1822?", None, "a company from the coast"),
                ("Which shelter was looked after by Judge Reve?", None, "the Nail#1"),
            ],
        ),
    ],
    "The Voyage of the Patient Anne": [
        (
            "The Patient Anne was a small ship with a large kitchen. She had been built to carry pilgrims, and her "
            "owner, a widow called Dorothea Finch, held that people who are well fed do not complain about the "
            "weather. When the pilgrims stopped coming she let the ship to the Society for Useful Plants, which "
            "wanted to know whether bread could be made from anything but corn. On 3 May 1868 she left the port of "
            "Lisk with a crew of twenty-six, two botanists and a cook whose name was Solomon Trask.\n"
            "Trask kept a diary, and it is because of him that we know so much about the voyage. The botanists, Miss "
            "Avery and Dr Lund, gathered roots, seeds and barks wherever the ship put in, and every evening they "
            "brought him a basket. He dried the things, ground them between two stones, and baked. A loaf from the "
            "bark of the limber tree tasted of candles. Flour from the seeds of the water nut was sweet, but it "
            "turned everybody's tongue blue for a week. On the island of Great Corm they ate a bread made of ferns "
            "which was so heavy that the carpenter used a slice of it to hold a door open. In his diary Trask gave "
            "each loaf a number and a mark from nought to ten; of the first forty, only three were given more than "
            "five.\n"
            "There was trouble too. The captain, Josiah Bream, had no interest in plants and a great deal in shells, "
            "and he would change course for a good beach. In August the ship lay for nine days off a reef while he "
            "filled four barrels. Dr Lund protested in writing. The captain replied that the letter had been used to "
            "wrap a shell. They did not speak again until Christmas, when Miss Avery made them shake hands over loaf "
            "number sixty-three, the first that everyone on board had liked. It had been baked from the root of a "
            "grey creeper that grew on cliffs, and nobody had thought of tasting it before the ship's goat did.\n"
            "The creeper made the Society rich for a time. It was planted on every roof in Lisk, and for ten years "
            "poor families could live on what grew above their heads. Then, in the wet summer of 1881, a mould "
            "destroyed the plants within a month. People went back to corn, and the grey loaf was forgotten. Miss "
            "Avery, who had by then become the head of the botanical garden, kept one pot of the creeper behind "
            "glass. It is still there, and once a year, on the third of May, a baker in Hook Lane is allowed to dig "
            "up a single root. What he makes of it is cut into twenty-nine very thin slices, one for everybody who "
            "sailed. The goat, whose name was Duchess, is remembered as well: her portrait, painted by the captain on "
            "the lid of a barrel, hangs over the door of the shop.",
            [
                ("Who owned the Patient Anne?", "Dorothea Finch", "a widow called Dorothea Finch"),
                ("To whom was the ship let?", "the Society for Useful Plants", "Society for Useful Plants"),
                ("When did the ship leave Lisk?", "3 May 1868", "On 3 May 1868"),
                ("What was the name of the cook?", "Solomon Trask", "Trask#1"),
                ("What did the bark of the limber tree taste of?", "candles"),
                ("What colour did the water nut turn people's tongues?", "blue"),
                ("What was the captain interested in?", "shells"),
                ("For how long did the ship lie off a reef?", "nine days"),
                ("Who made the captain and Dr Lund shake hands?", "Miss Avery#2", "Avery#2"),
                ("What destroyed the creeper in 1881?", "a mould", "mould"),
                ("Where is the baker's shop?", "in Hook Lane", "Hook Lane"),
                ("Into how many slices is the loaf cut?", "twenty-nine"),
                ("What was the goat called?", "Duchess"),
                ("On what was the goat's portrait painted?", "the lid of a barrel", "on the lid of a barrel"),
                ("Which mark did loaf number sixty-three get in the diary?", None, "more than five"),
                ("When did Solomon Trask die?", None, "1881"),
                ("Who painted the portrait of Dorothea Finch?", None, "the captain#1"),
            ],
        ),
    ],
    "Café Zoë": [
        (
            # José and Zoë are decomposed here (letter + combining mark), crème brûlée is composed.
            "The Cafe\u0301 Zoe\u0308 in Brno\u2013Nov\u00fd was opened in 1931 by Jose\u0301 N\u00fa\u00f1ez, a "
            "sailor who had married Zoe\u0308 \u0160t\u00edpkov\u00e1. Its cr\u00e8me br\u00fbl\u00e9e cost "
            "4\u00a0crowns 50 and was served \u2013 so the waiters said \u2013 \u201conly to people who can "
            "wait\u201d. During the war the cellar hid a printing press that belonged to Dvo\u0159\u00e1k & Sons.",
            [
                ("Who opened the café in 1931?", "Jose\u0301 N\u00fa\u00f1ez"),
                ("Whom had the sailor married?", "Zoe\u0308 \u0160t\u00edpkov\u00e1"),
                ("How much did the crème brûlée cost?", "4\u00a0crowns 50", "4\u00a0crowns"),
                (
                    "To whom was the dessert served?",
                    "only to people who can wait",
                    "\u201conly to people who can wait\u201d",
                ),
                ("Who owned the printing press?", "Dvo\u0159\u00e1k & Sons"),
                ("In what year was the café closed?", None, "1931"),
            ],
        ),
        (
            "The guest book of 1935\u20131938 has entries in many hands. A ship\u2019s doctor from Naxos wrote "
            "\u00ab\u03ba\u03b1\u03bb\u1f78\u03c2 \u03ba\u03b1\u03c6\u03ad\u03c2\u00bb and signed as "
            "\u0391\u03bd\u03b4\u03c1\u03ad\u03b1\u03c2 \u039b\u03af\u03bd\u03bf\u03c2; a painter, "
            "\u5c71\u672c\u82b1\u5b50, drew a cat and wrote \u300c\u732b\u306e\u76ee\u306b\u6708\u300d under it; and "
            "a student of law, \u0930\u0935\u093f \u0936\u0930\u094d\u092e\u093e, left the single word "
            "\u0927\u0928\u094d\u092f\u0935\u093e\u0926.",
            [
                ("Which years does the guest book cover?", "1935\u20131938"),
                (
                    "How did the doctor from Naxos sign?",
                    "\u0391\u03bd\u03b4\u03c1\u03ad\u03b1\u03c2 \u039b\u03af\u03bd\u03bf\u03c2",
                ),
                ("What was the name of the painter?", "\u5c71\u672c\u82b1\u5b50"),
                ("What did the painter write under the cat?", "\u732b\u306e\u76ee\u306b\u6708"),
                ("Who was the student of law?", "\u0930\u0935\u093f \u0936\u0930\u094d\u092e\u093e"),
                ("Which word did the student leave?", "\u0927\u0928\u094d\u092f\u0935\u093e\u0926"),
                ("What did the painter eat?", None, "a cat"),
            ],
        ),
    ],
    "The Kite Post": [
        (
            "On the lake of Imber letters were once sent by kite. The service, started by the sisters Maud and Renie "
            "Calloway in 1889, cost two pence a letter, and a stamp showed a heron with a bag in its beak. When there "
            "was no wind, Maud rowed. A goldsmith, Abel Thorpe, forged the stamp and was found out because his heron "
            "had two left legs.",
            [
                ("On which lake were letters sent by kite?", "Imber", "the lake of Imber"),
                ("Who started the service?", "Maud and Renie Calloway", "the sisters Maud and Renie Calloway"),
                ("How much did a letter cost?", "two pence"),
                ("What did the stamp show?", "a heron with a bag in its beak", "a heron"),
                ("Who rowed when there was no wind?", "Maud#2"),
                ("Who forged the stamp?", "Abel Thorpe", "A goldsmith, Abel Thorpe"),
                ("Why was the forger found out?", "his heron had two left legs", "because his heron had two left legs"),
                ("What was Abel Thorpe's punishment?", None, "two pence"),
                ("Who rowed when Maud was ill?", None, "Renie Calloway"),
            ],
        ),
        (
            "A museum now tells the story in short messages \U0001fa81. The sign at the door reads \u201cPull gently "
            "\U0001f469\u200d\U0001f467\u200d\U0001f466, the wind is old\u201d, and visitors vote for the best kite "
            "with a sticker: in 2019 the winner, a paper whale by Nadia Osei, got 1,204 \U0001f44d\U0001f3fd "
            "stickers, while the dragon \U0001f409 of Class 4b came second. The caf\u00e9 sells "
            "\u201clighthouse\u00a0cake\u201d at 3.20\u00a0\u20ac a slice.",
            [
                (
                    "What does the sign at the door say?",
                    "Pull gently \U0001f469\u200d\U0001f467\u200d\U0001f466, the wind is old",
                ),
                ("Who made the paper whale?", "Nadia Osei"),
                ("How many stickers did the winner get?", "1,204"),
                ("Which kite came second?", "the dragon \U0001f409 of Class 4b", "the dragon \U0001f409"),
                ("What cake does the café sell?", "lighthouse\u00a0cake"),
                ("How much does a slice cost?", "3.20\u00a0\u20ac"),
                ("How many stickers did the dragon get?", None, "1,204"),
                ("Who painted the sign at the door?", None, "Nadia Osei"),
            ],
        ),
    ],
    "Moss Street Observatory": [
        (
            "The observatory in Moss Street is the work of an amateur. Wilhelmina Tarr, who sold hats during the day, "
            "had the roof of her house cut open in 1903 so that her telescope could look out. Her neighbour Mr Pell "
            "complained about the noise until she showed him the rings of Saturn; after that he came every Thursday. "
            "She found two comets, one of which bears the name of her shop, the Blue Feather.",
            [
                ("What did Wilhelmina Tarr sell?", "hats"),
                ("When was the roof cut open?", "1903", "in 1903"),
                ("Who complained about the noise?", "Mr Pell", "Her neighbour Mr Pell"),
                ("What did she show to her neighbour?", "the rings of Saturn"),
                ("On which day did Mr Pell come?", "Thursday", "every Thursday"),
                ("How many comets did she find?", "two", "two comets"),
                ("What was the name of the shop?", "the Blue Feather", "Blue Feather"),
                ("Which comet bears the name of Mr Pell?", None, "the Blue Feather"),
                ("How much did the telescope cost?", None, "two"),
            ],
        ),
    ],
}

DEV = {
    "The Clock Strike of Varn": [
        (
            "In the winter of 1894 all the clocks of Varn stopped within one night. There was nothing wrong with "
            "them. The town had forty-four public clocks, on towers, schools, banks and stations, and they were wound "
            "by a guild of nine men and one woman who went from door to door with a ladder and a bag of keys. For "
            "this the guild was given twelve crowns a week, a sum that had not changed since the days of their "
            "grandfathers. When the mayor, Konrad Ostrow, refused to raise it, the winders put their keys into a "
            "sack, sank the sack in the fountain in front of the town hall, and went home.\n"
            "At first people found it funny. Lovers had an excuse for coming late, and so did everyone else. Then the "
            "trains began to wait for each other. The bakers, who used to get up by the bell of Saint Ode, overslept "
            "three times in a week, and bread was sold at noon. A lawsuit about an inheritance could not be decided, "
            "because nobody was able to say who had died first. On the fifth day the mayor sent soldiers to wind the "
            "clocks, but each clock had a trick of its own, and by the evening seven of them were broken. The worst "
            "was the great clock in the fish market, whose hands now ran backwards. Crowds came from the villages to "
            "see it, and an innkeeper, Emil Sacher, sold a beer called Yesterday.\n"
            "The speaker of the guild was the one woman in it, Thekla Born. She had learned the trade from an uncle, "
            "could carry the ladder alone, and was said to know the time without looking. Every afternoon she sat "
            "down on the edge of the fountain with some knitting and waited. The mayor could see her from his window. "
            "He sent her a letter, then a cake, then a lawyer; she ate the cake. Meanwhile a newspaper collected the "
            "stories of people who had been ruined, rescued or married because of the strike, and these filled a page "
            "a day.\n"
            "It ended in a way that no one had expected. On the nineteenth day the mayor's own daughter, Lucie, was "
            "to sing at the opera. The audience came when it liked, between five and ten, and the last of them "
            "arrived as she was taking off her shoes. That night Ostrow went down to the fountain in his slippers, "
            "rolled up his sleeves, and reached into the freezing water. He caught a bad cold and nine keys. The "
            "tenth was brought up the next morning by a boy with a magnet, who got a silver watch for it. The winders "
            "were promised thirty crowns a week and a new ladder, and by the first of March all the clocks were right "
            "again, apart from one. The people of the fish market had grown fond of theirs, and they asked to keep it "
            "as it was. It runs backwards to this day, and on the anniversary of the strike the oldest fishmonger "
            "pours a glass of beer over its weights. Thekla Born's knitting, a scarf eleven metres long, is on show "
            "in the town hall.",
            [
                ("How many public clocks did Varn have?", "forty-four", "forty-four public clocks"),
                ("Who was the mayor of Varn?", "Konrad Ostrow"),
                ("Where did the winders sink the keys?", "in the fountain in front of the town hall", "the fountain#1"),
                ("What was the beer of Emil Sacher called?", "Yesterday"),
                ("From whom had Thekla Born learned the trade?", "an uncle", "uncle"),
                (
                    "Who was to sing at the opera?",
                    "Lucie",
                    "the mayor's own daughter, Lucie",
                    "the mayor's own daughter",
                ),
                ("What did the boy get for the tenth key?", "a silver watch", "silver watch"),
                ("How much were the winders promised a week?", "thirty crowns", "thirty crowns a week"),
                ("How long is Thekla Born's scarf?", "eleven metres", "eleven metres long"),
                ("How much did the mayor pay for the opera?", None, "twelve crowns"),
                ("Who wound the clock of Saint Ode during the strike?", None, "soldiers"),
            ],
        ),
    ],
    "Tamsin Bay Library": [
        (
            "The library at Tamsin Bay has no books of its own. It was founded in 1952 by a retired postman, Rufus "
            "Amory, who had noticed on his rounds how many books stand on shelves and are never opened. He asked "
            "everybody in the bay for a list of what they had at home. From the lists he made a catalogue, which he "
            "kept in a boat shed, and anyone who wanted to read something had only to come and ask; Amory then told "
            "them at which door to knock. In the first year there were 212 borrowers and, because the rule was that a "
            "lender had to offer tea, about as many friendships. Two of them ended in a wedding.\n"
            "The catalogue is a curious thing. Amory did not care for the alphabet. He arranged the books by the "
            "street they lived in, and inside the street by the temper of the owner, so that a shy reader could begin "
            "with an easy house. Little signs in pencil warned of dogs, steep stairs and people who talked about "
            "their illnesses. A red star stood for a good fire. Mrs Pomfret of Gull Row, who owned only one book, a "
            "guide to the stars, had three red stars and was visited more often than the doctor, who had six hundred.\n"
            "When Amory died in 1971, the council wanted to give up the shed and to build what it called a proper "
            "library. The plans, drawn by the architect Gwendolen Hark, showed a tower of glass with room for forty "
            "thousand volumes. Nobody could say where they would come from. At a meeting in the chapel, which went on "
            "until two in the morning, a fisherman named Tobias Leake stood up and said that he had read every book "
            "in Gull Row without ever having owned one, and that he would be ashamed to take them away from the "
            "people who made the tea. The vote was 304 to 11. Hark, who had come to defend her tower, voted against "
            "it herself, and afterwards she drew the shed a new roof free of charge.\n"
            "Since then the list has grown in directions that its founder did not foresee. People began to lend out "
            "what they knew. Under the letter of a house you may now find, next to the novels, how to mend a net, the "
            "rules of eleven card games, or the story of the flood as told by somebody who was in it. In 1998 a "
            "schoolgirl, Priya Dane, copied the whole catalogue into a computer, and it took her two summers. She "
            "left out the pencil marks, out of politeness. There were so many complaints that she had to put them "
            "back, and she added a new one, a small green umbrella, for houses where one may wait until the rain "
            "stops. The present keeper of the catalogue is her brother Anil. He says that the most borrowed thing in "
            "the bay is still the guide to the stars, although Mrs Pomfret has been dead for thirty years. Her house "
            "stands empty; the key hangs in the shed, the kettle is on the stove, and whoever borrows the book is "
            "expected to make tea for the next.",
            [
                ("Who founded the library at Tamsin Bay?", "Rufus Amory", "a retired postman, Rufus Amory"),
                ("What did a lender have to offer?", "tea#1"),
                ("What did a red star stand for?", "a good fire", "good fire"),
                ("Which architect drew the plans of the tower?", "Gwendolen Hark", "the architect Gwendolen Hark"),
                ("Who copied the catalogue into a computer?", "Priya Dane", "a schoolgirl, Priya Dane"),
                (
                    "Which sign shows that one may wait until the rain stops?",
                    "a small green umbrella",
                    "green umbrella",
                ),
                ("Where does the key of the empty house hang?", "in the shed", "the shed#3"),
                ("How many books did Tobias Leake own?", None, "six hundred"),
                ("In what year did Mrs Pomfret visit the doctor?", None, "1971"),
            ],
        ),
    ],
    "Señora Quiñones": [
        (
            "The pianist Ine\u0301s Quin\u0303ones gave her last concert at the Th\u00e9\u00e2tre "
            "d\u2019\u00c9t\u00e9 on 7\u00a0June 1928. She played a sonata by Anton\u00edn Hru\u0161ka, a waltz of "
            "her own called \u201cNai\u0308vete\u0301\u201d, and \u2013 because the applause lasted for "
            "25\u201330\u00a0minutes \u2013 a lullaby by S\u00f8ren \u00c5berg.",
            [
                (
                    "Who gave her last concert in 1928?",
                    "Ine\u0301s Quin\u0303ones",
                    "The pianist Ine\u0301s Quin\u0303ones",
                ),
                ("When was the last concert of the pianist?", "7\u00a0June 1928", "on 7\u00a0June 1928"),
                ("What was the waltz called?", "Nai\u0308vete\u0301", "\u201cNai\u0308vete\u0301\u201d"),
                ("How long did the applause last?", "25\u201330\u00a0minutes", "for 25\u201330\u00a0minutes"),
                ("Who wrote the lullaby?", "S\u00f8ren \u00c5berg"),
                ("In what year was the sonata written?", None, "1928"),
            ],
        ),
        (
            "Her travelling trunk is covered with labels. One, from a hotel in Patras, reads "
            "\u039e\u03b5\u03bd\u03bf\u03b4\u03bf\u03c7\u03b5\u03af\u03bf \u0397 \u0391\u03c5\u03b3\u03ae; another is "
            "from the \u6d77\u9dd7\u98ef\u5e97, where she stayed for six weeks; a third, with the name "
            "\u0939\u093f\u092e\u093e\u0932\u092f \u092d\u0935\u0928 on it, shows an elephant. A steward had added "
            "the word \u092d\u093e\u0930\u0940 (\u201cheavy\u201d) in chalk.",
            [
                (
                    "Which words are on the label from Patras?",
                    "\u039e\u03b5\u03bd\u03bf\u03b4\u03bf\u03c7\u03b5\u03af\u03bf \u0397 \u0391\u03c5\u03b3\u03ae",
                ),
                ("Where did she stay for six weeks?", "\u6d77\u9dd7\u98ef\u5e97", "the \u6d77\u9dd7\u98ef\u5e97"),
                (
                    "Which name is on the label with the elephant?",
                    "\u0939\u093f\u092e\u093e\u0932\u092f \u092d\u0935\u0928",
                ),
                ("What did a steward write in chalk?", "\u092d\u093e\u0930\u0940", "the word \u092d\u093e\u0930\u0940"),
                ("Which animal does the third label show?", "an elephant", "elephant"),
                ("Who made the trunk?", None, "A steward"),
            ],
        ),
    ],
    "The Snail Race": [
        (
            "The snail race of Little Opping \U0001f40c is run on a wet towel every July. In 2022 the fastest, a "
            "snail named Comet \u2604\ufe0f, needed 3\u00a0minutes 12 for a distance of 33\u00a0centimetres; her "
            "trainer, Babs Okoro, was given a lettuce \U0001f96c and a hug from the judges "
            "\U0001f468\u200d\u2696\ufe0f\U0001f469\u200d\u2696\ufe0f. The owner of the snail that came last, Percy "
            "Flood, said: \u201cHe stopped to think.\u201d",
            [
                ("In which month is the snail race run?", "July"),
                (
                    "Which snail was the fastest in 2022?",
                    "Comet \u2604\ufe0f",
                    "Comet",
                    "a snail named Comet \u2604\ufe0f",
                ),
                ("How long did the fastest snail need?", "3\u00a0minutes 12"),
                ("What did the trainer get?", "a lettuce \U0001f96c and a hug", "a lettuce \U0001f96c", "a lettuce"),
                ("Who owned the snail that came last?", "Percy Flood"),
                ("What did Percy Flood say?", "He stopped to think.", "\u201cHe stopped to think.\u201d"),
                ("How old is Babs Okoro?", None, "33"),
                ("What is the name of the snail that came last?", None, "Percy Flood"),
            ],
        ),
    ],
}


def find(context, answer):
    """Where `answer` (perhaps with "#n") stands in `context`, as SQuAD writes it."""
    text, nth = re.fullmatch(r"(.*?)(?:#(\d))?", answer, re.DOTALL).groups()
    starts = [match.start() for match in re.finditer(re.escape(text), context)]
    if len(starts) < int(nth or 1) or (nth is None and len(starts) != 1):
        raise ValueError(f"{answer!r} occurs {len(starts)} times in {context[:40]!r}...")
    return {"text": text, "answer_start": starts[int(nth or 1) - 1]}


def make(split, articles):
    """Turn the texts above into the SQuAD v2.0 structure."""
    data, count = [], 0
    for title, paragraphs in articles.items():
        made = []
        for context, questions in paragraphs:
            qas = []
            for question, *answers in questions:
                count += 1
                impossible = answers[0] is None
                found = [find(context, answer) for answer in answers if answer is not None]
                if split == "train":
                    found = found[:1]  # like SQuAD: one answer in train, one or more in dev
                qa = {"id": f"v2-{split}-{count:03d}", "question": question, "is_impossible": impossible}
                qa |= {"answers": [], "plausible_answers": found} if impossible else {"answers": found}
                qas.append(qa)
            made.append({"context": context, "qas": qas})
        data.append({"title": title, "paragraphs": made})
    return {"version": "v2.0", "data": data}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write train.json and dev.json to")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for split, articles in (("train", TRAIN), ("dev", DEV)):
        made = make(split, articles)
        text = json.dumps(made, ensure_ascii=False, indent=1) + "\n"
        (folder / f"{split}.json").write_text(text, encoding="utf-8", newline="\n")
        qas = [qa for article in made["data"] for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
        print(f"{split}: {len(qas)} questions, {sum(qa['is_impossible'] for qa in qas)} of them without an answer")


if __name__ == "__main__":
    main()

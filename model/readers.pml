/* Readers with positions, and restored logs: two parts of producer.pml that a run may switch on. */

#ifdef RESTORES
/* -- An operator stops the sidecar, and puts back an older copy of its log, or of all its data. RESTORES is how often,
 * at most 1. A run with restores has one sidecar, and neither retention nor forgetting. */

/* The client: its connection is broken, so it resumes its session. It takes no answer before. */

#define GIVEN(k, s) (side[k].epoch[NAME(s)] > 0 -> side[k].epoch[NAME(s)] : side[k].term * OPENS + side[k].opens - 1)

inline resume(k_, s_) {
  p = NAME(s_);
  if
  :: session[s_].epoch > GIVEN(k_, s_) -> printf("dataLoss(s%d)\n", s_ + 1); session[s_].mode = ENDED /* this log never gave the epoch */
  :: session[s_].epoch < side[k_].epoch[p] -> printf("fenced(s%d)\n", s_ + 1); session[s_].mode = ENDED
  :: side[k_].epoch[p] == 0 && len(flight[k_]) < FLIGHT -> /* nobody has the name: the log needs a record again */
     printf("%c.resume(s%d)\n", LETTER(k_), s_ + 1);
     side[k_].epoch[p] = session[s_].epoch;
     append(k_, SESSION, p, 0, session[s_].epoch)
  :: side[k_].durable[p] == session[s_].epoch ->
     if
#ifndef BUG_RESUMES_BELOW_ITS_RECEIPTS
     :: side[k_].persisted[p] < session[s_].known || side[k_].term < session[s_].epoch / OPENS -> printf("dataLoss(s%d)\n", s_ + 1); session[s_].mode = ENDED
#endif
     :: else ->
        printf("%c.resumed(s%d,%d)\n", LETTER(k_), s_ + 1, side[k_].persisted[p]);
        must((held[p] & UP_TO(session[s_].known)) == UP_TO(session[s_].known),
             "BROKEN: loss: a session goes on, and a message with a receipt is gone\n");
        session[s_].known = side[k_].persisted[p];
        session[s_].is_broken = 0
     fi
  :: else
  fi
}

#define CAN_RESUME(k, s) (session[s].mode == PUBLISHING && session[s].is_broken && side[k].mode == SERVING)

proctype Client(byte s) {
  do
  :: d_step { CAN_RESUME(0, s) -> resume(0, s) }
  od
}

/* The log is what it was when its next place was `place_`. Nothing of the stopped process lands any more. */
inline restore(k_, place_) {
  restores++;
  do
  :: len(flight[k_]) > 0 -> flight[k_]?t, kind, p, id, e
  :: else -> break
  od;
  end = place_; messages = 0; owner_term = 0;
  for (n : 0 .. NAMES - 1) { held[n] = 0; answered[n] = 0; newest[n] = 0 };
  for (j : 0 .. LOG - 1) {
    if
    :: j >= place_ ->
       log[j].kind = 0; log[j].term = 0; log[j].who = 0; log[j].is_void = 0;
       log[j].name = 0; log[j].id = 0; log[j].epoch = 0; log[j].index = 0
    :: j < place_ && log[j].kind == MARKER && log[j].term > owner_term -> owner_term = log[j].term; owner = log[j].who
    :: j < place_ && log[j].kind == MESSAGE && !log[j].is_void ->
       held[log[j].name] = held[log[j].name] | BIT(log[j].id); messages++
    :: else
    fi
  };
  for (n : 0 .. NAMES - 1) {
    do
    :: (held[n] & UP_TO(told[n])) != UP_TO(told[n]) -> told[n]--
    :: else -> break
    od
  };
  for (n : 0 .. SESSIONS - 1) {
    if
    :: session[n].mode == OPENING -> session[n].mode = NEW; session[n].epoch = 0; session[n].at = 0
    :: session[n].mode == PUBLISHING -> session[n].is_broken = 1
    :: else
    fi
  }
}

/* A snapshot says which messages it covers. Recovery reads what follows them. */
inline restore_log(k_, place_) {
  printf("restoreLog(place%d)\n", place_);
  restore(k_, place_);
  store[k_].place = (store[k_].place > place_ -> place_ : store[k_].place);
  load(k_)
}

inline restore_all(k_, place_) {
  printf("restoreAll(place%d)\n", place_);
  restore(k_, place_);
  if
  :: store[k_].place > place_ -> /* the copy has an older snapshot: none is the oldest */
     store[k_].place = 0; store[k_].term = 0; store[k_].index = 0;
     for (n : 0 .. NAMES - 1) { store[k_].persisted[n] = 0; store[k_].durable[n] = 0 }
  :: else
  fi;
  load(k_)
}

proctype Operator(byte place) {
  do
  :: d_step { restores < RESTORES && place < end -> restore_all(0, place) }
  :: d_step { restores < RESTORES && place < end -> restore_log(0, place) }
  od
}
#endif

#ifdef READERS
/* -- A reader. After each message it stores its position: the message's index, and the ownership under which the message
 * was written. It asks any sidecar for the message that follows. */

byte next_index; /* of the message after the position */
byte position_ownership;
bit is_refused;  /* it was told that its position is not in the log, which is true */
byte seen[NAMES * MESSAGES + 1];

#define MESSAGE_AT(place) (log[place].name * 4 + log[place].id)
#if defined(RESTORES) && !defined(BUG_OWNERSHIP_IS_THE_TERM)
#define OWNERSHIP(place) ((log[place].history * 8 + log[place].term) * 2 + log[place].who)
#else
#define OWNERSHIP(place) (log[place].term * 2 + log[place].who)
#endif

/* What an owner has in flight may be stored. Another sidecar may already have shown the message. */
#ifdef BUG_REFUSES_BEFORE_APPENDS_SETTLE
#define MAY_BE_STORED(k) false
#else
#define MAY_BE_STORED(k) (receipts[k] > 0 || len(flight[k]) > 0)
#endif

/* The proof: an append that lands now, and its receipt. After another sidecar's marker it is no proof, as in Writer. */
inline prove(k_) {
  is_foreign = false;
#ifndef BUG_REFUSES_WITHOUT_PROOF
  for (n : side[k_].confirmed .. end - 1) {
    if
    :: log[n].kind == MARKER && !log[n].is_void -> is_foreign = true
    :: else
    fi
  }
#endif
}

#ifdef RESTORES
#define MAY_BE_LOST restores
#else
#define MAY_BE_LOST false
#endif

/* What is lost: a message that a reader has got, and that a restored log does not hold, with its ownership. */
inline refuse_position() {
  is_refused = MAY_BE_LOST;
  for (n : 0 .. end - 1) {
    if
    :: log[n].kind == MESSAGE && !log[n].is_void && log[n].index == next_index - 1 && OWNERSHIP(n) == position_ownership ->
       is_refused = false
    :: else
    fi
  };
  must(is_refused, "BROKEN: reader: a position is refused, and nothing is lost\n")
}

/* The place of a message that the sidecar may show, or LOG. */
inline find(k_, index_) {
  j = 0;
  do
  :: j < LOG && !(log[j].kind == MESSAGE && !log[j].is_void && log[j].index == index_ && index_ < side[k_].index) -> j++
  :: else -> break
  od;
#ifdef BUG_SHOWS_WHAT_IS_NOT_CONFIRMED
  if
  :: j == LOG && index_ == side[k_].index && receipts[k_] > 0 ->
     j = side[k_].confirmed;
     do
     :: j < LOG && !(log[j].kind == MESSAGE && log[j].who == k_ && log[j].term == side[k_].term) -> j++
     :: else -> break
     od
  :: else
  fi
#endif
}

inline read_on(k_) {
  if
  :: next_index > side[k_].index ->
     if
#ifdef BUG_ANY_SIDECAR_SAYS_WHERE_THE_TOPIC_ENDS
     :: true -> printf("%c.afterEnd(%d)\n", LETTER(k_), next_index); refuse_position()
#else
     :: side[k_].mode == SERVING && !MAY_BE_STORED(k_) ->
        prove(k_);
        if
        :: is_foreign
        :: else -> printf("%c.afterEnd(%d)\n", LETTER(k_), next_index); refuse_position()
        fi
     :: else
#endif
     fi
  :: else ->
     if
     :: next_index > 0 -> find(k_, next_index - 1)
     :: else -> j = LOG
     fi;
     if
#ifndef BUG_POSITION_WITHOUT_OWNERSHIP
     :: j < LOG && OWNERSHIP(j) != position_ownership -> printf("%c.diverged(%d)\n", LETTER(k_), next_index); refuse_position()
#endif
     :: else ->
        for (n : 0 .. LOG - 1) {
          must(log[n].kind != MESSAGE || log[n].is_void || log[n].index >= next_index || seen[log[n].index] == MESSAGE_AT(n),
               "BROKEN: reader: it goes on, and has not read a message before its position\n")
        };
        find(k_, next_index);
        if
        :: j < LOG ->
           printf("%c.read(%d,index%d)\n", LETTER(k_), log[j].id, next_index);
           seen[next_index] = MESSAGE_AT(j); position_ownership = OWNERSHIP(j);
           next_index++
        :: else
        fi
     fi
  fi
}

proctype Reader() {
  do
  :: d_step { !is_refused -> read_on(0) }
#if SIDECARS > 1
  :: d_step { !is_refused -> read_on(1) }
#endif
  od
}
#endif

/* A topic of sequence IDs: sessions, sidecars, a log that delays and loses appends, snapshots, retention, forgetting.
 * readers.pml has its readers, and restored logs.
 *
 * docs/internals/model.md says what is modelled and what is not. `python -m model.check` runs this file.
 *
 * Every step of a process is one atomic step, so all of the state is in the global variables below. The environment is
 * as bad as the rules allow:
 *   - The network keeps each frame of a session, and delivers it to any sidecar, at any time, in any order, any number
 *     of times. So pipelining, resending and frames of ended processes need no state.
 *   - A receipt may be late or lost: a session that did not get it behaves like one that sends the message again.
 *   - An append may land late, also after another sidecar's marker, or not at all.
 *   - A sidecar may take over a topic at any time, also while another sidecar owns the topic and is well.
 *
 * Each BUG_ removes one rule. model/check.py has the list.
 */

/* Bounds. Each is a number of … */
#ifndef NAMES
#define NAMES 1 /* producer names */
#endif
#ifndef SESSIONS
#define SESSIONS 1 /* sessions; session s has the name s % NAMES */
#endif
#ifndef MESSAGES
#define MESSAGES 2 /* messages of a name: sequence IDs 1 to MESSAGES, at most 3; 0 is none */
#endif
#ifndef SIDECARS
#define SIDECARS 1 /* sidecars, at most 2 */
#endif
#ifndef TERMS
#define TERMS 3 /* terms, at most 7 */
#endif
#ifndef LOG
#define LOG 9 /* entries of the log, at most 15 */
#endif
#ifndef FLIGHT
#define FLIGHT 2 /* appends of a sidecar that have not landed */
#endif
#ifndef CRASHES
#define CRASHES 1 /* kills of a sidecar */
#endif
#ifndef LOSSES
#define LOSSES 1 /* failures of the log that lose appends */
#endif
/* Parts that a run may switch on: RETENTION (with one loss of the store), FORGETTING, LIVENESS; in readers.pml READERS,
 * RESTORES. */

#define BIT(id) (1 << (id))
#define NAME(s) ((s) % NAMES)
#define LETTER(k) (65 + (k)) /* sidecars A and B, in traces */
#define OPENS 4 /* An epoch is (term, n), here term * OPENS + n. The epoch 0 is none. */

/* Kinds of entries in the log: a message; a sidecar begins a term; a session begins; retention repeats the watermark and
 * the session of a name; the policy forgets a name. */
mtype = { MESSAGE, MARKER, SESSION, STATEMENT, FORGET };

/* -- The log: the only truth. */

typedef Entry {
  unsigned kind : 3;
  unsigned term : 3;
  unsigned who : 1;   /* with `term`, the ownership: the token of the marker under which the entry was appended */
  unsigned is_void : 1;  /* Not under the last marker that took ownership. Every reader finds this from earlier entries. */
  unsigned name : 1;
  unsigned id : 2;
  unsigned epoch : 5;
  unsigned index : 3; /* of the next message here, as every reader counts */
#ifdef RESTORES
  unsigned history : 1; /* with `who` and `term`, the token of a marker: the terms of a restored log repeat */
#endif
};

Entry log[LOG];
byte end;                          /* the place of the next entry */
byte first;                        /* the first entry that retention has left */
byte messages;                     /* the index of the next message */
byte owner_term, owner;            /* of the last marker that took ownership: its term is above all terms before */
chan flight[SIDECARS] = [FLIGHT] of { byte, mtype, byte, byte, byte }; /* appends: term, kind, name, id, epoch */
bit broken[SIDECARS];              /* the log refuses the sidecar until the sidecar opens the log again */
byte receipts[SIDECARS];           /* appends that landed, and whose outcome the sidecar does not know */

/* -- Sidecars: what a crash loses, and the store, which a crash leaves. */

#define STANDBY 0
#define READING 1 /* its marker is in the log; it answers RECOVERING */
#define SERVING 2 /* it believes that it owns the topic */
#define DAMAGED 3 /* it gives up */

typedef Sidecar {
  byte mode;
  byte term;      /* the highest term that it knows; while it serves, its own */
  byte opens;     /* sessions that it has opened in this term */
  byte confirmed; /* the place after the last entry that it has merged */
  byte index;
  byte pushed[NAMES], persisted[NAMES];
  byte epoch[NAMES], durable[NAMES]; /* the epoch in force, and the newest in a confirmed entry */
};

typedef Snapshot {
  byte place, term, index;
  byte persisted[NAMES], durable[NAMES];
};

Sidecar side[SIDECARS];
Snapshot store[SIDECARS];
byte crashes, losses;
#ifdef RETENTION
byte statements; /* that retention has appended, at most 2 */
bit store_lost;
#endif

/* -- Sessions of producers. */

#define NEW 0
#define OPENING 1
#define PUBLISHING 2
#define ENDED 3

typedef Session {
  byte mode;
  byte at;    /* the sidecar that it asked to open it */
  byte epoch;
  byte base;  /* persisted, as Open answered; it sends what follows */
#ifdef RESTORES
  bit is_broken; /* its connection: it has to resume */
  byte known;    /* it was told that all up to here is stored */
#endif
};

Session session[SESSIONS];

/* -- What must hold. These variables only observe. */

byte held[NAMES];     /* a bit for each ID that the log ever held, not void */
byte told[NAMES];     /* the highest ID that a session was told is stored */
byte answered[NAMES]; /* the highest epoch that an Open has returned */
bit forgotten[NAMES]; /* the log holds that the policy has forgotten the name: nothing is told of it any more */
#ifdef RESTORES
bit restores;
byte newest[NAMES];   /* 1 + the session whose Open was answered last in this history */
#endif
#ifdef LIVENESS
byte dup[SESSIONS];   /* a bit for each ID that was answered Dup */
#define ALL ((1 << (MESSAGES + 1)) - 2)
ltl receipt { <> (dup[0] == ALL) }
#endif

#define must(condition, text) if :: (condition) :: else -> printf(text); assert(false) fi
#define MAX(a, b) (((a) > (b)) -> (a) : (b))
#define UP_TO(id) ((1 << ((id) + 1)) - 2)

hidden byte n, j, t, kind, p, id, e, is_foreign, is_stated, is_cut;

/* An entry lands at the end of the log. */
inline land(k_, term_, kind_, name_, id_, epoch_) {
  log[end].kind = kind_; log[end].term = term_; log[end].who = k_;
  log[end].name = name_; log[end].id = id_; log[end].epoch = epoch_;
  log[end].index = messages;
#ifdef RESTORES
  log[end].history = restores;
#endif
  if
  :: kind_ == MARKER && term_ > owner_term -> owner_term = term_; owner = k_
  :: else ->
#ifdef BUG_VOID_ENTRIES_COUNT
     log[end].is_void = (kind_ == MARKER)
#else
     log[end].is_void = (kind_ == MARKER || term_ != owner_term || k_ != owner)
#endif
  fi;
  if
  :: log[end].is_void -> printf(":void\n")
  :: else ->
     printf("\n");
     if
     :: kind_ == MESSAGE ->
        must(!(held[name_] & BIT(id_)), "BROKEN: at most once: the log holds a message twice\n");
        must(held[name_] == UP_TO(id_ - 1), "BROKEN: order: the log holds a message before its predecessor\n");
        must(epoch_ >= answered[name_], "BROKEN: fencing: an older session adds a message after a newer Open was answered\n");
        held[name_] = held[name_] | BIT(id_);
        messages++
     :: kind_ == FORGET -> told[name_] = 0; forgotten[name_] = 1
     :: else
     fi
  fi;
  end++
}

/* Append to the log. The outcome comes later. */
inline append(k_, kind_, name_, id_, epoch_) {
  if
  :: broken[k_]
  :: else -> flight[k_]!side[k_].term, kind_, name_, id_, epoch_
  fi
}

/* Put a valid entry in force: a confirmed append, or an entry that recovery reads. Merges by maximum. */
inline merge(k_, at_) {
  p = log[at_].name;
  if
  :: log[at_].kind == MESSAGE ->
     must(log[at_].index == side[k_].index, "BROKEN: positions: an index names two messages\n");
     side[k_].index++
  :: else
  fi;
  if
  :: log[at_].kind == MARKER
  :: log[at_].kind == FORGET ->
     side[k_].persisted[p] = 0; side[k_].pushed[p] = 0;
#ifndef BUG_FORGOTTEN_NAME_KEEPS_ITS_SESSION
     side[k_].epoch[p] = 0; side[k_].durable[p] = 0
#endif
  :: else ->
#ifdef BUG_REPLAY_WITHOUT_MAXIMUM
     side[k_].persisted[p] = (log[at_].kind == SESSION -> side[k_].persisted[p] : log[at_].id);
#else
     side[k_].persisted[p] = MAX(side[k_].persisted[p], log[at_].id);
#endif
     side[k_].pushed[p] = MAX(side[k_].pushed[p], side[k_].persisted[p]);
     side[k_].durable[p] = MAX(side[k_].durable[p], log[at_].epoch);
     side[k_].epoch[p] = MAX(side[k_].epoch[p], side[k_].durable[p])
  fi
}

/* Read from the last merged entry up to `to_`, and merge what is valid. */
inline replay(k_, to_) {
  j = side[k_].confirmed;
  do
  :: j < to_ ->
     if
#ifdef BUG_VOID_ENTRIES_HAVE_AN_INDEX
     :: log[j].is_void && log[j].kind == MESSAGE -> side[k_].index++
     :: log[j].is_void && log[j].kind != MESSAGE
#else
     :: log[j].is_void
#endif
     :: else -> merge(k_, j)
     fi;
     side[k_].term = MAX(side[k_].term, log[j].term);
     j++
  :: else -> break
  od;
  side[k_].confirmed = to_
}

/* What was in flight and is not in the log by now is not there, and never will be. */
inline fail_in_flight(k_) {
  for (n : 0 .. NAMES - 1) {
#ifndef BUG_FAILED_APPEND_STAYS_PUSHED
    side[k_].pushed[n] = side[k_].persisted[n];
#endif
    side[k_].epoch[n] = side[k_].durable[n]
  }
}

/* A session learns that a message is stored. */
#define tell(s_, id_, text) \
  must(held[NAME(s_)] & BIT(id_), text); \
  told[NAME(s_)] = (forgotten[NAME(s_)] -> 0 : MAX(told[NAME(s_)], id_))

#ifdef RESTORES
#define knows(s_, id_) \
  if \
  :: session[s_].mode == PUBLISHING && !session[s_].is_broken -> session[s_].known = MAX(session[s_].known, id_) \
  :: else \
  fi
#endif

/* -- Sessions. */

inline ask_open(k_, s_) {
  e = side[k_].term * OPENS + side[k_].opens;
  side[k_].opens++;
  printf("%c.open(s%d,epoch%d)\n", LETTER(k_), s_ + 1, e);
  side[k_].epoch[NAME(s_)] = e; /* fences older sessions from now on */
  session[s_].mode = OPENING; session[s_].at = k_; session[s_].epoch = e;
#ifndef BUG_SESSION_WITHOUT_RECORD
  append(k_, SESSION, NAME(s_), 0, e)
#endif
}

#define IS_NEXT(s) (s < NAMES || session[s - NAMES].mode != NEW) /* by symmetry sessions of a name begin in order */
#if defined(RESTORES) && !defined(BUG_EPOCHS_REPEAT)
#define FIRST_OPEN (2 * restores) /* a random number: no history gives the epochs of another */
#else
#define FIRST_OPEN 0
#endif
#ifdef RESTORES
#define LAST_OPEN (FIRST_OPEN + 1)
#else
#define LAST_OPEN (OPENS - 2)
#endif
#define CAN_OPEN(k, s) (session[s].mode == NEW && IS_NEXT(s) && side[k].mode == SERVING && side[k].opens <= LAST_OPEN && len(flight[k]) < FLIGHT)
#if defined(BUG_OPEN_ANSWERED_AT_ONCE)
#define IS_OPENED(k, s) (side[k].epoch[NAME(s)] >= session[s].epoch)
#elif defined(BUG_SESSION_WITHOUT_RECORD)
#define IS_OPENED(k, s) (side[k].pushed[NAME(s)] == side[k].persisted[NAME(s)])
#else
#define IS_OPENED(k, s) (side[k].durable[NAME(s)] >= session[s].epoch)
#endif
#define IN_ITS_TERM(k, s) (side[k].term == session[s].epoch / OPENS)

proctype Producer(byte s) {
  do
  :: d_step { CAN_OPEN(0, s) -> ask_open(0, s) }
#if SIDECARS > 1
  :: d_step { CAN_OPEN(1, s) -> ask_open(1, s) }
#endif
  :: d_step { /* the answer, once the record is durable, so that all before it has settled */
       session[s].mode == OPENING && side[session[s].at].mode == SERVING && IN_ITS_TERM(session[s].at, s) &&
         IS_OPENED(session[s].at, s) ->
       session[s].base = side[session[s].at].persisted[NAME(s)];
       session[s].mode = PUBLISHING;
       printf("%c.opened(s%d,%d)\n", LETTER(session[s].at), s + 1, session[s].base);
       must((held[NAME(s)] & UP_TO(session[s].base)) == UP_TO(session[s].base),
            "BROKEN: Open: its answer covers a message that the log does not hold\n");
       told[NAME(s)] = MAX(told[NAME(s)], session[s].base);
#ifdef RESTORES
       session[s].known = session[s].base;
       newest[NAME(s)] = (session[s].epoch > answered[NAME(s)] -> s + 1 : newest[NAME(s)]);
#endif
       answered[NAME(s)] = MAX(answered[NAME(s)], session[s].epoch)
     }
  :: d_step { /* no answer: it tries again */
       session[s].mode == OPENING && (side[session[s].at].mode != SERVING || !IN_ITS_TERM(session[s].at, s)) ->
       session[s].mode = NEW; session[s].epoch = 0; session[s].at = 0
     }
#ifdef FORGETTING
  :: d_step { /* it has all receipts, and disconnects for good; its frames may still arrive */
       session[s].mode == PUBLISHING && told[NAME(s)] == MESSAGES ->
       session[s].mode = ENDED; printf("end(s%d)\n", s + 1)
     }
#endif
  od
}

/* -- Admission. A frame has one message. Its link is the message before. */

#ifdef BUG_LINK_IS_THE_ID_SENT_BEFORE
#define LINK(s, i) (i > 2 -> i - 2 : i - 1) /* it has just sent message i - 2 again */
#else
#define LINK(s, i) (i - 1)
#endif

inline judge(k_, s_, i_) {
  p = NAME(s_);
  if
#ifndef BUG_NO_EPOCH_CHECK
  :: side[k_].epoch[p] != session[s_].epoch -> printf("%c.refuse(%d,s%d,FENCED)\n", LETTER(k_), i_, s_ + 1)
  :: else ->
#else
  :: true ->
#endif
     if
#ifndef BUG_NO_LINK
     :: i_ > side[k_].pushed[p] && LINK(s_, i_) > side[k_].pushed[p] ->
        printf("%c.refuse(%d,s%d,PREDECESSOR_MISSING)\n", LETTER(k_), i_, s_ + 1)
#endif
#ifdef BUG_IN_FLIGHT_COUNTS_AS_STORED
     :: i_ <= side[k_].pushed[p] ->
#else
     :: i_ <= side[k_].persisted[p] ->
#endif
        printf("%c.answer(%d,s%d,Dup)\n", LETTER(k_), i_, s_ + 1);
        tell(s_, i_, "BROKEN: Dup: the log does not hold the message\n");
#ifdef RESTORES
        knows(s_, i_);
#endif
#ifdef LIVENESS
        dup[s_] = dup[s_] | BIT(i_)
#endif
#ifndef BUG_IN_FLIGHT_COUNTS_AS_NEW
     :: else ->
        if
        :: i_ <= side[k_].pushed[p] -> printf("%c.answer(%d,s%d,Unknown)\n", LETTER(k_), i_, s_ + 1)
        :: i_ > side[k_].pushed[p] && len(flight[k_]) < FLIGHT ->
#else
     :: else ->
        if
        :: len(flight[k_]) < FLIGHT ->
#endif
           printf("%c.admit(%d,s%d)\n", LETTER(k_), i_, s_ + 1);
#ifdef RESTORES
           must(newest[p] == 0 || newest[p] == s_ + 1, "BROKEN: fencing: a session of another history is taken for the newest\n");
#endif
#ifndef BUG_PUSHED_AFTER_THE_WRITE
           side[k_].pushed[p] = MAX(side[k_].pushed[p], i_);
#endif
           append(k_, MESSAGE, p, i_, session[s_].epoch);
#ifdef BUG_RECEIPT_BEFORE_CONFIRMATION
           tell(s_, i_, "BROKEN: receipt: the log does not hold the message\n")
#endif
        :: else /* it does not read the stream on */
        fi
     fi
  fi
}

#define IS_SENT(s, i) (session[s].mode >= PUBLISHING && i > session[s].base)
#ifdef BUG_SERVES_BEFORE_READING
#define JUDGES(k) (side[k].mode >= READING)
#else
#define JUDGES(k) (side[k].mode == SERVING)
#endif

proctype Message(byte s; byte i) {
  do
  :: d_step { IS_SENT(s, i) && JUDGES(0) -> judge(0, s, i) }
#if SIDECARS > 1
  :: d_step { IS_SENT(s, i) && JUDGES(1) -> judge(1, s, i) }
#endif
  od
}

/* -- The log, and what a sidecar does with its outcomes. */

proctype Writer(byte k) {
  do
  :: d_step { /* an append lands: in time, or late */
       len(flight[k]) > 0 && end < LOG ->
       flight[k]?t, kind, p, id, e;
       printf("%c.land(%e,%d)", LETTER(k), kind, (kind == SESSION -> e : id));
       if
       :: side[k].mode == SERVING && t == side[k].term -> receipts[k]++
       :: else
       fi;
       land(k, t, kind, p, id, e)
     }
  :: d_step { /* an append is lost, and with it all later ones of this opening */
       len(flight[k]) > 0 && losses < LOSSES ->
       losses++;
       flight[k]?t, kind, p, id, e;
       printf("%c.lose(%e,%d)\n", LETTER(k), kind, (kind == SESSION -> e : id));
#ifndef BUG_LOG_GOES_ON_AFTER_A_LOSS
       do
       :: len(flight[k]) > 0 -> flight[k]?t, kind, p, id, e
       :: else -> break
       od;
       broken[k] = (side[k].mode == SERVING)
#endif
     }
  :: d_step { /* settle: a receipt arrives */
       side[k].mode == SERVING && receipts[k] > 0 ->
       receipts[k]--;
       j = side[k].confirmed; is_foreign = false;
       do
       :: log[j].kind != MARKER && log[j].who == k && log[j].term == side[k].term -> break
       :: else ->
          if
          :: log[j].kind == MARKER && !log[j].is_void -> is_foreign = true; t = log[j].term
          :: else
          fi;
          j++
       od;
#ifdef BUG_CONFIRMS_WITHOUT_READING_A_GAP
       is_foreign = false;
#endif
       if
       :: is_foreign -> /* another sidecar's marker is before it: NOT_OWNER */
          printf("%c.stepBack\n", LETTER(k));
          fail_in_flight(k);
          side[k].mode = STANDBY; receipts[k] = 0; side[k].opens = 0
       :: else ->
          printf("%c.confirm(%e,%d)\n", LETTER(k), log[j].kind, (log[j].kind == SESSION -> log[j].epoch : log[j].id));
          merge(k, j);
          side[k].confirmed = j + 1;
          if
          :: log[j].kind == MESSAGE ->
             tell(log[j].name, log[j].id, "BROKEN: receipt: the log does not hold the message\n");
#ifdef RESTORES
             for (n : 0 .. SESSIONS - 1) {
               if
               :: NAME(n) == log[j].name && session[n].epoch == log[j].epoch -> knows(n, log[j].id)
               :: else
               fi
             }
#endif
          :: else
          fi
       fi
     }
  od
}

/* -- Owners. */

/* Open the log for writing, and write a marker with a term above all known terms. */
inline mark(k_) {
  side[k_].term++;
  broken[k_] = 0; receipts[k_] = 0;
  printf("%c.mark(%d)", LETTER(k_), side[k_].term);
  land(k_, side[k_].term, MARKER, 0, 0, 0)
}

inline serve(k_) {
  fail_in_flight(k_);
  side[k_].mode = SERVING; side[k_].opens = FIRST_OPEN;
  printf("%c.serve(%d)\n", LETTER(k_), side[k_].persisted[0]);
  for (n : 0 .. NAMES - 1) {
    must(side[k_].persisted[n] >= told[n] || owner != k_ || owner_term != side[k_].term,
         "BROKEN: recovery: a message that was acknowledged counts as new\n")
  };
  skip
}

/* A killed sidecar starts again. It knows what its store has. */
inline load(k_) {
  side[k_].mode = STANDBY; side[k_].opens = 0;
  broken[k_] = 0; receipts[k_] = 0;
  must(store[k_].place >= first, "BROKEN: retention: the log begins after the snapshot\n");
  side[k_].term = store[k_].term; side[k_].confirmed = store[k_].place; side[k_].index = store[k_].index;
  for (n : 0 .. NAMES - 1) {
    side[k_].persisted[n] = store[k_].persisted[n]; side[k_].pushed[n] = store[k_].persisted[n];
    side[k_].durable[n] = store[k_].durable[n]; side[k_].epoch[n] = store[k_].durable[n]
  };
  skip
}

inline store_numbers(k_) {
  for (n : 0 .. NAMES - 1) {
#ifdef BUG_SNAPSHOT_OF_PUSHED
    store[k_].persisted[n] = side[k_].pushed[n];
#else
    store[k_].persisted[n] = side[k_].persisted[n];
#endif
    store[k_].durable[n] = side[k_].durable[n]
  };
  skip
}

inline store_place(k_) {
#ifdef BUG_SNAPSHOT_AT_THE_LOGS_END
  store[k_].place = end; store[k_].index = messages;
#else
  store[k_].place = side[k_].confirmed; store[k_].index = side[k_].index;
#endif
  store[k_].term = side[k_].term
}

#ifdef LIVENESS
#define MAY_TAKE_OVER(k) (SIDECARS == 1 || side[SIDECARS - 1 - k].mode < READING)
#ifdef BUG_UNKNOWN_OUTCOMES_STAY
#define IS_UNCERTAIN(k) false
#else
#define IS_UNCERTAIN(k) broken[k]
#endif
#else
#define MAY_TAKE_OVER(k) true
#define IS_UNCERTAIN(k) (broken[k] || IN_FLIGHT(k, 0) || IN_FLIGHT(k, NAMES - 1))
#define IN_FLIGHT(k, n) (side[k].pushed[n] > side[k].persisted[n] || side[k].epoch[n] > side[k].durable[n])
#endif

#ifdef BUG_RETENTION_AHEAD_OF_THE_SNAPSHOT
#define AHEAD 1
#else
#define AHEAD 0
#endif
#ifdef BUG_FORGETS_A_CONNECTED_NAME
#define IS_IDLE true
#else
#define IS_IDLE (session[0].mode == ENDED && session[SESSIONS - 1].mode == ENDED)
#endif

proctype Owner(byte k) {
  do
  :: d_step { /* take over: what was in flight may land later, and is void then */
       side[k].mode == STANDBY && side[k].term < TERMS && end < LOG && MAY_TAKE_OVER(k) ->
#if defined(BUG_READS_BEFORE_ITS_MARKER)
       replay(k, end);
       if
       :: side[k].term < TERMS -> side[k].mode = READING
       :: else
       fi
#else
       mark(k); side[k].mode = READING
#endif
     }
  :: d_step { /* read up to its own marker, and only then decide */
       side[k].mode == READING ->
#if defined(BUG_READS_BEFORE_ITS_MARKER)
       if
       :: end < LOG -> mark(k); side[k].confirmed = end; serve(k)
       :: else -> side[k].mode = STANDBY
       fi
#else
       j = end - 1;
       do
       :: log[j].kind == MARKER && log[j].who == k && log[j].term == side[k].term -> break
       :: else -> j--
       od;
       t = j;
#ifdef RESTORES
       is_cut = (messages < side[k].index); /* the snapshot covers messages that the log does not hold */
#endif
       replay(k, t + 1);
       if
#if defined(RESTORES) && !defined(BUG_SNAPSHOT_AFTER_THE_LOGS_END)
       :: is_cut -> printf("%c.damaged\n", LETTER(k)); side[k].mode = DAMAGED
#endif
#ifndef BUG_MARKER_WITHOUT_A_HIGHER_TERM
       :: log[t].is_void -> printf("%c.outbid\n", LETTER(k)); side[k].mode = STANDBY
       :: else -> serve(k)
#else
       :: true -> serve(k)
#endif
       fi
#endif
     }
  :: d_step { /* an outcome is unknown, or the log has refused: open the log again, and read on */
       side[k].mode == SERVING && IS_UNCERTAIN(k) && side[k].term < TERMS ->
#if defined(BUG_FAILS_WITHOUT_READING)
       printf("%c.fail\n", LETTER(k)); fail_in_flight(k); broken[k] = 0
#elif defined(BUG_SETTLES_WITHOUT_A_NEW_MARKER)
       printf("%c.readAndFail\n", LETTER(k));
       replay(k, end); fail_in_flight(k); broken[k] = 0; receipts[k] = 0
#else
       printf("%c.settle\n", LETTER(k));
       fail_in_flight(k);
       side[k].mode = STANDBY; receipts[k] = 0; side[k].opens = 0; broken[k] = 0
#endif
     }
#ifdef BUG_SNAPSHOT_IN_TWO_WRITES
  :: d_step { side[k].mode == SERVING && store[k].persisted[0] != side[k].persisted[0] -> printf("%c.store(%d)\n", LETTER(k), side[k].persisted[0]); store_numbers(k) }
  :: d_step { side[k].mode == SERVING && store[k].place != side[k].confirmed -> printf("%c.store(place%d)\n", LETTER(k), side[k].confirmed); store_place(k) }
#else
  :: d_step { /* a snapshot: numbers and place in one write */
       side[k].mode == SERVING && store[k].place < side[k].confirmed ->
       store_numbers(k); store_place(k);
       printf("%c.store(%d,place%d)\n", LETTER(k), store[k].persisted[0], store[k].place)
     }
#endif
#ifdef RETENTION
  :: d_step { /* before it drops entries: state at the log's end what is in force of a name */
       side[k].mode == SERVING && len(flight[k]) < FLIGHT && statements < 2 && side[k].durable[0] > 0 ->
       statements++;
       printf("%c.state(%d)\n", LETTER(k), side[k].persisted[0]);
       append(k, STATEMENT, 0, side[k].persisted[0], side[k].durable[0])
     }
  :: d_step { /* drop what the snapshot covers, if later confirmed entries state what is in force */
       side[k].mode == SERVING && store[k].place + AHEAD > first && store[k].place + AHEAD <= side[k].confirmed ->
       t = store[k].place + AHEAD;
       is_stated = 0;
       for (j : t .. side[k].confirmed - 1) {
         if
         :: !log[j].is_void ->
            is_stated = is_stated | (log[j].id == side[k].persisted[0]) | (log[j].epoch == side[k].durable[0]) << 1
         :: else
         fi
       };
#ifdef BUG_RETENTION_WITHOUT_STATEMENTS
       is_stated = 3;
#endif
       if
       :: is_stated == 3 ->
          printf("%c.drop(place%d)\n", LETTER(k), t);
          for (j : first .. t - 1) {
            log[j].kind = 0; log[j].term = 0; log[j].who = 0; log[j].is_void = 0;
            log[j].name = 0; log[j].id = 0; log[j].epoch = 0; log[j].index = 0
          };
          first = t
       :: else
       fi
     }
  :: d_step { /* the store is lost, and rebuilt from what the log still has */
       !store_lost ->
       store_lost = 1; printf("%c.loseStore\n", LETTER(k));
       store[k].place = first; store[k].term = 0;
       store[k].index = (first < end -> log[first].index : messages);
       for (n : 0 .. NAMES - 1) { store[k].persisted[n] = 0; store[k].durable[n] = 0 };
       load(k)
     }
#endif
#ifdef FORGETTING
  :: d_step { /* the policy forgets name 0, which has no connected stream */
       side[k].mode == SERVING && len(flight[k]) < FLIGHT && side[k].durable[0] > 0 && !IN_FLIGHT(k, 0) && IS_IDLE ->
       printf("%c.forget\n", LETTER(k));
       append(k, FORGET, 0, 0, 0)
     }
#endif
  :: d_step { /* kill -9, and the next start */
       crashes < CRASHES ->
       crashes++; printf("%c.kill\n", LETTER(k)); load(k)
     }
  od
}

#include "readers.pml"

init {
  byte k, s, i;
  atomic {
    /* By symmetry, sidecar 0 is the first owner, and session 0 the first session. */
    mark(0);
#ifdef RESTORES
    replay(0, 1);
    side[0].mode = SERVING;
#else
    land(0, 1, SESSION, 0, 0, OPENS);
    replay(0, 2);
    side[0].mode = SERVING; side[0].opens = 1;
    session[0].mode = PUBLISHING; session[0].epoch = OPENS; answered[0] = OPENS;
#endif
    for (k : 0 .. SIDECARS - 1) { run Owner(k); run Writer(k) }
    for (s : 0 .. SESSIONS - 1) {
      run Producer(s);
#ifdef RESTORES
      run Client(s);
#endif
      for (i : 1 .. MESSAGES) { run Message(s, i) }
    }
#ifdef RESTORES
    for (i : 1 .. LOG - 1) { run Operator(i) }
#endif
#ifdef READERS
    run Reader();
#endif
    k = 0; s = 0; i = 0
  }
}

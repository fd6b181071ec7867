/* Collective: all_reduce, all_gather, reduce_scatter, broadcast and barrier over a group's links.
 *
 * All are one exchange between each pair: a header that both must agree on, the part of the
 * sender's data that the receiver sums (its contribution), and the part of the result that the
 * sender owns. Each rank sums its part element by element in rank order.
 *
 * Threading: as comm.h.
 */
#ifndef COMM_COLLECTIVE_H
#define COMM_COLLECTIVE_H

#include "comm/group.h"

Status collective_all_reduce(Comm *comm, void *data, int64_t count, DType dtype, CommReduce reduce,
                             Stream *stream) STATUS_CHECKED;
Status collective_all_gather(Comm *comm, void *data, const int64_t *begins,
                             Stream *stream) STATUS_CHECKED;
Status collective_reduce_scatter(Comm *comm, void *data, const int64_t *begins,
                                 Stream *stream) STATUS_CHECKED;
Status collective_broadcast(Comm *comm, void *data, int64_t size_bytes, int root,
                            Stream *stream) STATUS_CHECKED;
Status collective_barrier(Comm *comm, Stream *stream) STATUS_CHECKED;

/* Among the ranks listed: checks that all split alike (`digest`: of members and label) and shares
 * the offers: each takes the group id of the first rank and the region of the lowest rank that
 * shares memory with it (index in `ranks`; itself: its own). */
Status collective_split(Group *group, const int *ranks, int num_ranks, uint64_t digest,
                        GroupOffer *offer) STATUS_CHECKED;

#endif

//! Looks at many nodes from outside and says whether they form one good ring.

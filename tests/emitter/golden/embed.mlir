// castiron emit --kernel embed --shape 16x8 --codec bf16 --isa avx2 --threads 2
// 75 lines, sha256 0ca4644ba05d738cd12764aced7bee88802a8af77a0b2cdf0b6ddc23907fb6a2
            scf.for %15 = %c0 to %c5 step %c1 {
              %17 = arith.addi %12, %13 : index
              %18 = arith.muli %13, %c4 : index
              %19 = arith.divui %10, %c6 : index
              %20 = arith.addi %19, %15 : index
              %21 = vector.load %m1[%17, %20, %c0] : memref<1x4x64xi8>, vector<32xi8>
              %22 = vector.bitcast %21 : vector<32xi8> to vector<8xi32>
              %23 = arith.shli %22, %c7 : vector<8xi32>
              %24 = arith.andi %22, %c8 : vector<8xi32>
              %25 = vector.bitcast %23 : vector<8xi32> to vector<8xf32>
              %26 = vector.bitcast %24 : vector<8xi32> to vector<8xf32>
              %27 = vector.load %m1[%17, %20, %c9] : memref<1x4x64xi8>, vector<32xi8>
              %28 = vector.bitcast %27 : vector<32xi8> to vector<8xi32>
              %29 = arith.shli %28, %c7 : vector<8xi32>
              %30 = arith.andi %28, %c8 : vector<8xi32>
              %31 = vector.bitcast %29 : vector<8xi32> to vector<8xf32>
              %32 = vector.bitcast %30 : vector<8xi32> to vector<8xf32>
              %33 = arith.muli %15, %c6 : index
              vector.store %25, %1[%33, %18] : memref<8x16xf32>, vector<8xf32>
              %34 = arith.muli %15, %c6 : index
              %35 = arith.addi %34, %c1 : index
              vector.store %26, %1[%35, %18] : memref<8x16xf32>, vector<8xf32>
              %36 = arith.muli %15, %c6 : index
              %37 = arith.addi %18, %c3 : index
              vector.store %31, %1[%36, %37] : memref<8x16xf32>, vector<8xf32>
              %38 = arith.muli %15, %c6 : index
              %39 = arith.addi %38, %c1 : index
              %40 = arith.addi %18, %c3 : index
              vector.store %32, %1[%39, %40] : memref<8x16xf32>, vector<8xf32>
            }
